"""Packed weights in a model that knows nothing of them: train it in floats, pack it, go on using it.

python bench/examples/drop_in.py
"""

import torch
from torch import nn
from torch.nn import functional

import realizar_torch as rt


class Classifier(nn.Module):
    """An ordinary PyTorch model: tokens, one residual block, two classes."""

    def __init__(self, vocabulary: int = 64, width: int = 256):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [B, T] → logits [B, 2]."""
        x = self.tokens(ids)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences, and whether more than half of their tokens are even."""
    ids = torch.randint(0, 64, (count, 15))
    return ids, ((ids % 2 == 0).sum(1) > 7).long()


def accuracy(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(ids).argmax(1) == labels).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(40):
        ids, labels = examples(64)
        optimizer.zero_grad()
        functional.cross_entropy(model(ids), labels).backward()
        optimizer.step()
    ids, labels = examples(500)
    print(f"dense:  accuracy {accuracy(model, ids, labels):.3f}")

    print(rt.quantize_model(model, "Q4_K", exclude=("head",)))
    print(model)
    print(f"packed: accuracy {accuracy(model, ids, labels):.3f}")

    # the rest is as it was: a state dict, a cast, and training of what is not packed
    model.load_state_dict(model.state_dict())
    print(f"bfloat16: accuracy {accuracy(model.bfloat16(), ids, labels):.3f}")
    model.float()
    trained = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    loss = functional.cross_entropy(model(ids), labels)
    gradients = torch.autograd.grad(loss, trained)
    print(f"{len(gradients)} parameters have gradients, the packed weights stay frozen")


if __name__ == "__main__":
    main()
