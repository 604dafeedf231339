"""One packed checkpoint, several classes: what they share is loaded or missed, never made up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_directories import change_tensors, write_hf_directory
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
)

import realizar_torch as rt
from realizar_torch.errors import FormatError, MissingTensorsError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
MARIAN: dict[str, Any] = {
    "vocab_size": 50, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 0,
    "max_position_embeddings": 32, "decoder_start_token_id": 0,
}  # fmt: skip


def save_packed(model: PreTrainedModel, folder: Path, **options: Any) -> PreTrainedModel:
    rt.quantize_model(model.eval(), "Q8_0", **options)
    model.config.quantization_config = rt.hf.RealizarConfig.from_model(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "norm.weight"])
@pytest.mark.parametrize("head", [AutoModel, AutoModelForSequenceClassification])
@pytest.mark.parametrize("kind", ["llama", "unknown"])
def test_what_another_head_shares_is_missed(kind: str, head: Any, name: str, tmp_path: Path) -> None:
    """transformers would start it at random, packed bytes not at all, and warn."""
    model = write_hf_directory(tmp_path / "dense")
    if kind == "unknown":
        model.__class__ = type("OfSomeScript", (LlamaForCausalLM,), {})
    save_packed(model, tmp_path)
    head.from_pretrained(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop(f"model.{name}"))
    with pytest.raises(MissingTensorsError, match=f"missing (model.)?{name}"):
        head.from_pretrained(tmp_path)


@pytest.mark.parametrize("architectures", [[1], "LlamaForCausalLM", ["LlamaForCausalLM", None], {"a": 1}])
def test_architectures_are_a_list_of_names(architectures: Any, tmp_path: Path) -> None:
    save_packed(write_hf_directory(tmp_path / "dense"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": architectures}))
    with pytest.raises(FormatError, match=r"architectures .*, expected a list of names of classes"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_only_what_is_new_is_started(tmp_path: Path) -> None:
    model = save_packed(write_hf_directory(tmp_path / "dense"), tmp_path)
    head, found = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, output_loading_info=True, attn_implementation="eager"
    )
    assert found["missing_keys"] == {"score.weight"}
    assert torch.equal(head.model(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    assert isinstance(head.score, torch.nn.Linear) and head(IDS).logits.isfinite().all()


def test_a_body_has_parts_that_its_heads_were_saved_without(tmp_path: Path) -> None:
    model = save_packed(BertForMaskedLM(BertConfig(**SIZES)), tmp_path)
    body, found = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert found["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}
    assert torch.equal(body(IDS).last_hidden_state, model.bert(IDS).last_hidden_state)


def test_a_body_is_loaded_into_a_head(tmp_path: Path) -> None:
    body = save_packed(BertModel(BertConfig(**SIZES)), tmp_path)
    head, found = BertForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert found["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert torch.equal(head.bert(IDS).pooler_output, body(IDS).pooler_output)
    head.save_pretrained(tmp_path)
    other = BertForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, ignore_mismatched_sizes=True
    )
    assert torch.equal(other.bert(IDS).pooler_output, body(IDS).pooler_output)
    assert other(IDS).logits.isfinite().all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_is_loaded_into_its_language_model(tied: bool, tmp_path: Path) -> None:
    """Whose head is packed where it is tied to the packed embedding."""
    dense = write_hf_directory(tmp_path / "dense", tie_word_embeddings=tied)
    body = save_packed(dense.model, tmp_path)
    model, found = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert found["missing_keys"] == (set() if tied else {"lm_head.weight"})
    states = body(IDS).last_hidden_state
    assert torch.equal(model.model(IDS).last_hidden_state, states)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    head = model.model.embed_tokens.dequantize() if tied else model.lm_head.weight
    torch.testing.assert_close(model(IDS).logits, states @ head.T)


def test_tables_that_transformers_computes_are_not_missed(tmp_path: Path) -> None:
    """Marian's are sinusoidal, and it does not save them."""
    model = save_packed(MarianMTModel(MarianConfig(**MARIAN)), tmp_path)
    again = MarianMTModel.from_pretrained(tmp_path)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    name = "model.encoder.layers.0.fc1.weight"
    change_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(MissingTensorsError, match=rf"missing {name} \[96, 68\]$"):
        MarianMTModel.from_pretrained(tmp_path)


def test_what_transformers_starts_is_not_written_into_blocks(tmp_path: Path) -> None:
    """DistilBERT computes its table of positions anew, in the shape of the weight that it finds."""
    sizes = {"vocab_size": 50, "dim": 64, "hidden_dim": 96, "n_layers": 1, "n_heads": 4}
    config = DistilBertConfig(**sizes, max_position_embeddings=32, sinusoidal_pos_embds=True)
    model = DistilBertModel(config)
    table = model.embeddings.position_embeddings
    torch.nn.init.normal_(table.weight)
    model.embeddings.position_embeddings = rt.QuantizedEmbedding.from_embedding(table, "Q8_0")
    save_packed(model, tmp_path)
    head = DistilBertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(head.distilbert(IDS).last_hidden_state, model(IDS).last_hidden_state)
    assert "initialize_weights" not in vars(head)
