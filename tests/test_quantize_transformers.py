"""quantize_model on models of transformers whose code does more with weights than call their modules."""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers as tf
from packed_model import load_decoded
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextScaledWordEmbedding
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextScaledWordEmbedding

import realizar_torch as rt
from realizar_torch.hf.modules import weight_shape
from realizar_torch.nn.embedding import ScaledEmbedding

_SIZES = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2}
_HEADS = {**_SIZES, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64}
_T5 = {
    **{"vocab_size": 99, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "tie_word_embeddings": False},
}
_DEBERTA = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
_GEMMA = {**_HEADS, "num_key_value_heads": 2, "head_dim": 16}
_MAMBA2 = {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1}

# a model and the names of what its code reads
MODELS: dict[str, tuple[Callable[[], tf.PreTrainedModel], set[str]]] = {
    "T5": (lambda: tf.T5ForConditionalGeneration(tf.T5Config(**_T5)), {"wo"}),
    "T5 gated": (
        lambda: tf.T5ForConditionalGeneration(tf.T5Config(**_T5, feed_forward_proj="gated-gelu")),
        {"wo"},
    ),
    "LongT5": (lambda: tf.LongT5ForConditionalGeneration(tf.LongT5Config(**_T5)), {"wo"}),
    "Mamba": (
        lambda: tf.MambaForCausalLM(tf.MambaConfig(**_SIZES, state_size=8, time_step_rank=32)),
        {"x_proj", "dt_proj", "out_proj", "lm_head"},
    ),
    "Mamba2": (
        lambda: tf.Mamba2ForCausalLM(tf.Mamba2Config(**_SIZES, **_MAMBA2)),
        {"out_proj", "lm_head"},
    ),
    "DeBERTa-v2": (
        lambda: tf.DebertaV2ForMaskedLM(tf.DebertaV2Config(**_HEADS, **_DEBERTA)),
        {"rel_embeddings"},
    ),
    "RWKV": (
        lambda: tf.RwkvForCausalLM(tf.RwkvConfig(**_SIZES, rescale_every=1)),
        {"output", "value"},
    ),
    "Falcon": (lambda: tf.FalconForCausalLM(tf.FalconConfig(**_HEADS)), set()),
    "Gemma": (lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_GEMMA)), set()),
    "Gemma2": (lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_GEMMA)), set()),
    "Gemma3": (lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_GEMMA)), set()),
}


def run(model: tf.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            return model(input_ids=ids, decoder_input_ids=ids[:, :4]).logits
        return model(input_ids=ids).logits


@pytest.mark.parametrize("name", MODELS)
def test_what_the_code_reads_stays_dense_and_the_rest_is_packed(name: str) -> None:
    build, read = MODELS[name]
    model = build().eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.1)
    dense = copy.deepcopy(model)
    report = rt.quantize_model(model, "Q8_0", exclude=())
    reasons = [entry.reason for entry in report.skipped if "too small" not in entry.reason]
    assert all(" reads " in reason for reason in reasons), reasons
    skipped = {entry_name.rpartition(".")[2] for entry in report.skipped for entry_name in entry.names}
    assert read <= skipped
    assert load_decoded(dense, model) >= 2
    ids = torch.randint(1, 99, (2, 9))
    expected = run(dense, ids)
    assert expected.std() > 0.01
    # the same numbers in fp32, whose sums have another order
    assert (run(model, ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_twins_of_linears_and_embeddings_are_packed_and_saved(tmp_path) -> None:
    falcon = MODELS["Falcon"][0]()
    assert rt.quantize_model(falcon, "Q8_0", exclude=()).skipped == ()
    gemma = MODELS["Gemma3"][0]().eval()
    assert rt.quantize_model(gemma, "Q8_0", exclude=()).skipped == ()
    table = gemma.get_input_embeddings()
    assert type(table) is ScaledEmbedding and table.scale == 8.0 and gemma.lm_head.weight is table.weight
    gemma.config.quantization_config = rt.hf.RealizarConfig.from_model(gemma)
    gemma.save_pretrained(tmp_path)
    ids = torch.randint(1, 99, (2, 9))
    assert torch.equal(run(tf.Gemma3ForCausalLM.from_pretrained(tmp_path), ids), run(gemma, ids))


def test_the_reason_names_the_class() -> None:
    report = rt.quantize_model(MODELS["T5 gated"][0](), "Q8_0")
    (reason, *_) = (entry.reason for entry in report.skipped if entry.names[0].endswith("wo"))
    assert reason.endswith("wo is not only called: T5DenseGatedActDense reads self.wo.weight")


class Shifted(torch.nn.Embedding):
    """A scaled embedding, and one operation more."""

    scalar_embed_scale, embed_scale = 8.0, torch.tensor(8.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype) + 1


class Elsewhere(torch.nn.Embedding):
    """The operations of a scaled embedding, on another number."""

    scalar_embed_scale, other_scale = 8.0, torch.tensor(3.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.other_scale.to(self.weight.dtype)


class Twice(Gemma3TextScaledWordEmbedding):
    """The code of a scaled embedding, whose super() scales already."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


def test_scaled_embeddings_are_told_by_what_they_compute() -> None:
    model = torch.nn.Sequential(Gemma3nTextScaledWordEmbedding(9, 64, 0, 2.5))
    dense = copy.deepcopy(model)
    assert weight_shape(model[0]) == (9, 64)
    assert rt.quantize_model(model, "Q8_0").skipped == ()
    assert load_decoded(dense, model) == 1
    ids = torch.arange(9)
    assert torch.equal(model(ids), dense(ids))


@pytest.mark.parametrize(
    "kind", [T5Gemma2TextScaledWordEmbedding, BartScaledWordEmbedding, Shifted, Elsewhere, Twice]
)
def test_embeddings_that_do_more_than_scale_stay_dense(kind: type[torch.nn.Embedding]) -> None:
    table = kind(9, 64, 0)
    assert weight_shape(table) is None
    (entry,) = rt.quantize_model(torch.nn.Sequential(table), "Q8_0").modules
    assert entry.reason == f"0 is a {kind.__name__}, which may compute something else"
