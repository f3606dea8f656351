"""A checkpoint by its path: models that see serve their text, remote code and GGUF files are read, other kinds are told what they are."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.engine.model.auto_class import auto_class
from paged_attn.engine.model.load_options import LoadOptions
from tests.engine.models import random_prompts, tiny, tokenizer
from tests.tiny_models import VOCAB, build, config_for

NEW = 8
PROMPTS = random_prompts(2, 3, 17, 40)
SEES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_SEES: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 8}
IDS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
SEEING: dict[str, dict[str, Any]] = {
    "llava": {
        "vision_config": {"model_type": "clip_vision_model", "image_size": 16, **SEES},
        "text_config": {"model_type": "llama", **TEXT}, "image_token_index": 90,
    },
    "qwen2_5_vl": {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": QWEN_SEES, **IDS},
    "qwen3_vl": {"text_config": {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
                 "vision_config": {**QWEN_SEES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **IDS},
    "idefics3": {"vision_config": {"image_size": 16, **SEES}, "text_config": {"model_type": "llama", **TEXT}, "image_token_id": 90},
    "paligemma": {
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 16, "projection_dim": 32, **SEES},
        "text_config": {"model_type": "gemma", "use_bidirectional_attention": False, **TEXT}, "image_token_index": 90, "projection_dim": 32,
    },
}  # fmt: skip


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "llava" else pytest.mark.slow) for name in SEEING])
def test_a_model_that_sees_serves_its_text(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SEEING[name], "tie_word_embeddings": False})
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    with LLM(saved(model, tmp_path), device="cpu", num_pages=64, page_size=4, max_batch_tokens=16) as llm:
        got = [completion.token_ids for completion in llm.generate(PROMPTS, SamplingParams(max_tokens=NEW))]
        assert llm.generate(["Hi"], SamplingParams(max_tokens=2))[0].token_ids
    assert got == expected and len({tuple(row) for row in got}) > 1


CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own_qwen"


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A checkpoint whose type transformers does not know, with the code of it."""
    folder = saved(tiny(), tmp_path / "remote")
    (folder / "own_code.py").write_text(CODE)
    config = tiny().config.to_dict() | {"model_type": "own_qwen", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_remote_code_runs_when_it_is_trusted_and_asks_nobody(remote: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    expected = tiny().generate(torch.tensor([PROMPTS[1]]), max_new_tokens=NEW, do_sample=False)[0, len(PROMPTS[1]) :].tolist()
    with LLM(remote, device="cpu", num_pages=64, trust_remote_code=True) as llm:
        assert type(llm.engine.runner.model).__name__ == "OwnForCausalLM"
        assert llm.generate([PROMPTS[1]], SamplingParams(max_tokens=NEW))[0].token_ids == expected
    with pytest.raises(ValueError, match=r"is made of Python code of its own, .* read it, and then give trust_remote_code=True \(--trust"):
        LLM(remote, device="cpu")


@pytest.mark.slow
def test_nothing_is_read_from_stdin(remote: Path) -> None:
    command = [sys.executable, "-m", "paged_attn.cli.main", "generate", "--model", str(remote), "--prompt", "x", "--device", "cpu"]
    done = subprocess.run(command, input="y\ny\ny\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "give trust_remote_code=True" in done.stderr and "[y/N]" not in done.stdout + done.stderr


@pytest.mark.parametrize("as_path", [True, False])
def test_a_gguf_file_needs_a_package_and_is_read_by_it(as_path: bool, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    settings: dict[str, Any] = {} if as_path else {"gguf_file": "tiny.gguf"}
    where = tmp_path / "tiny.gguf" if as_path else tmp_path
    if importlib.util.find_spec("gguf") is None:
        with pytest.raises(ValueError, match="a GGUF file needs the package gguf, which is not installed: pip install gguf"):
            LLM(where, device="cpu", **settings)
    with pytest.raises(ValueError, match=r"no model at '.*': it has no other.gguf"):
        LLM(tmp_path, gguf_file="other.gguf")


def write_gguf(model: Any, path: Path) -> None:
    """A Llama as llama.cpp's converter lays it out: float32, with rows of q and k paired for its rotary embedding."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    words = sorted(tokenizer().get_vocab(), key=tokenizer().get_vocab().__getitem__)
    words[-1] = words[4] + words[5]  # a file without merges is none of this kind
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_token_merges([f"{words[4]} {words[5]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers.": "blk."}
    names |= {"post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm", "model.norm": "output_norm"}
    names |= {"model.embed_tokens": "token_embd", "lm_head": "output"}
    for name, weight in model.state_dict().items():
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(name[-13:-12] if "_proj" in name else "")
        if heads and "self_attn" in name:
            weight = weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        for theirs, other in names.items():
            name = name.replace(theirs, other)
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("as_path", [True, False])
def test_a_gguf_file_gives_the_tokens_of_the_model_that_it_was_made_of(as_path: bool, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    model = build("llama", tie_word_embeddings=False, head_dim=8)
    write_gguf(model, tmp_path / "tiny.gguf")
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False, eos_token_id=2)[0, len(p) :].tolist() for p in PROMPTS
    ]
    path, settings = (tmp_path / "tiny.gguf", {}) if as_path else (tmp_path, {"gguf_file": "tiny.gguf"})
    with LLM(path, dtype=torch.float32, device="cpu", num_pages=64, **settings) as llm:  # type: ignore[arg-type]
        assert [c.token_ids for c in llm.generate(PROMPTS, SamplingParams(max_tokens=NEW))] == expected
        assert llm.get_tokenizer() is not None


@pytest.mark.parametrize(
    ("name", "head", "settings", "what"),
    [
        ("t5", "T5ForConditionalGeneration", {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4}, "an encoder-decoder"),
        ("bart", "BartForConditionalGeneration", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}, "an encoder-decoder"),
        ("bert", "BertModel", {}, "an encoder, which reads a text in both directions"),
        ("bert", "BertForMaskedLM", {}, "an encoder, which reads a text in both directions"),
        ("modernbert", "ModernBertModel", {"pad_token_id": 0}, "an encoder, which reads a text in both directions"),
    ],
)
def test_other_kinds_are_told_what_they_are(name: str, head: str, settings: dict[str, Any], what: str, tmp_path: Path) -> None:
    small = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, **settings}
    model = getattr(transformers, head)(AutoConfig.for_model(name, **small)).eval()
    for compiled in (True, False):
        with pytest.raises(UnsupportedError, match=f"{head} is {what}"):
            LLM(model, task="generate", compile=compiled)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=f"holds a {head}, which is {what}"):
        LLM(tmp_path, task="generate")


def test_no_head_is_made_up(tmp_path: Path) -> None:
    """Embedding models are published so; AutoModelForCausalLM would give them a random head, with a warning."""
    tiny().get_decoder().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="holds Qwen3Model and no weights of lm_head: without a language-model head"):
        LLM(tmp_path, device="cpu")


def test_a_model_that_reads_its_prompt_in_both_directions() -> None:
    """PaliGemma as it is published: a prefix-LM."""
    text = {"model_type": "gemma", **TEXT}
    config = AutoConfig.for_model("paligemma", **{**SEEING["paligemma"], "text_config": text})
    with pytest.raises(UnsupportedError, match="PaliGemmaForConditionalGeneration reads a prompt in both directions"):
        LLM(AutoModelForImageTextToText.from_config(config).float())


def test_a_checkpoint_of_no_language_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("vit", hidden_size=32, architectures=["ViTForImageClassification"])
    with pytest.raises(UnsupportedError, match="'x' holds a ViTForImageClassification, which transformers knows as no language model"):
        auto_class(config, "x")


def test_causal_models_of_those_kinds_are_read_as_ever() -> None:
    for name, more in (("bert", {"is_decoder": True}), ("roberta", {"architectures": ["RobertaForCausalLM"]}), ("qwen3", {})):
        assert auto_class(AutoConfig.for_model(name, **more), "x") is transformers.AutoModelForCausalLM
    assert auto_class(config_for("gemma3_text"), "x") is transformers.AutoModelForCausalLM


class NoAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids).relu())  # type: ignore[no-any-return]


def test_a_model_without_attention_is_told_that() -> None:
    with pytest.raises(UnsupportedError, match="NoAttention cannot run paged batches: the model has no attention that paged_attn can see"):
        LLM(NoAttention())


def test_what_is_for_a_path_is_refused_for_a_model() -> None:
    with pytest.raises(ValueError, match="revision is for loading from a path; give it to the from_pretrained"):
        LLM(tiny(), revision="main")
    with pytest.raises(TypeError, match="trust_remote_code is 'yes'; allowed are True and False"):
        LoadOptions(trust_remote_code="yes")  # type: ignore[arg-type]
