"""What the generic path refuses at load, and that it says why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import Device, DType, PoolConfig, SpeculationConfig
from cluster.runtime.any_model import load_any_model
from cluster.runtime.factory import load_engine
from cluster.runtime.model_spec import ModelError
from cluster.runtime.ranks import RankJob, Ranks
from tests.fakes import edit_json, save_tiny_checkpoint
from tests.paged_run import CPU
from tests.tiny_networks import SHAPE, save_network

pytestmark = pytest.mark.integration


def save(directory: Path, family: str, **fields: Any) -> None:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    wanted = {name: value for name, value in (SHAPE | fields).items() if value is not None}
    config = AutoConfig.for_model(family, pad_token_id=None, **wanted)
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config)
    except ValueError:
        model = AutoModel.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and parameter.dim() == 1 else 0.0, 0.15)
    model.save_pretrained(directory)


def refusal(path: Path, max_model_len: int | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        load_any_model(path, torch.float32, CPU, None, max_model_len)
    return str(caught.value)


_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_DEEPSEEK = {**_MLA, "head_dim": None, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
_MAMBA_HEADS = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_JAMBA = {"head_dim": None, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}

_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "t5": ({"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}, "it is an encoder-decoder"),
    "mamba": ({"state_size": 8, "head_dim": None}, "it does not compute attention through transformers' attention"),
    "rwkv": ({"attention_hidden_size": 64, "head_dim": None}, "it does not compute attention through"),
    "jamba": ({**_JAMBA, "use_mamba_kernels": False, "mamba_d_state": 4}, "1 attention calls in 2 layers"),
    "falcon_h1": (_MAMBA_HEADS, "it keeps state between tokens other than keys and values"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "it does not compute attention through transformers' attention interface"),
    "falcon": ({"head_dim": None, "alibi": True}, "it uses ALiBi"),
    "gpt_oss": (
        {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "needs s_aux",
    ),
    "deepseek_v3": ({**_DEEPSEEK, "moe_intermediate_size": 32}, r"heads of different sizes \(\[16, 24\]\)"),
    "bert": ({"head_dim": None}, "its logits over causal attention are not its own"),
    "llama4_text": ({"num_local_experts": 2, "intermediate_size_mlp": 64}, "layers of type 'chunked_attention'"),
}


@pytest.mark.filterwarnings("ignore")  # slow paths of families that are refused anyway
@pytest.mark.parametrize("family", REFUSED)
def test_a_network_that_cannot_be_paged_is_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    fields, reason = REFUSED[family]
    save(tmp_path, family, **fields)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}: ")
    assert re.search(reason, message), message


_OWN_CODE = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "code of its own": (
        {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
        "which is never run",
    ),
    "a type that nobody knows": ({"model_type": "mine"}, "transformers has no such"),
    "quantised weights": ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised with 'gptq'"),
    "cross-attention": ({"add_cross_attention": True}, "it has cross-attention"),
    "a draft of the Llama family's kind": ({"paceline_draft": {}}, "a paceline_draft of model type 'gpt2'"),
    "a nonsense field": ({"n_head": "many"}, "config.json is not usable|transformers cannot build it"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_cannot_be_served_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    fields, reason = CONFIGS[name]
    save_network(tmp_path, "gpt2")
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ModelError, match=reason):
        load_any_model(tmp_path, torch.float32, CPU, None, None)


def test_rotary_embeddings_that_follow_the_batch_are_served_while_they_do_not(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 64}
    save_tiny_checkpoint(tmp_path, rope_parameters=rope)
    assert "set max_model_len to 64 or less (it is 65)" in refusal(tmp_path, 65)
    assert load_any_model(tmp_path, torch.float32, CPU, None, 64).max_model_len == 64


def test_missing_and_surplus_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_network(tmp_path, "gpt2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    fewer = {name: tensor for name, tensor in tensors.items() if "h.1.mlp.c_fc.bias" not in name}
    save_file(fewer, file, metadata={"format": "pt"})
    assert "missing tensor transformer.h.1.mlp.c_fc.bias (1 such)" in refusal(tmp_path)
    save_file(tensors | {"transformer.h.0.other": torch.ones(3)}, file, metadata={"format": "pt"})
    assert "unexpected tensor" in refusal(tmp_path)
    file.unlink()
    assert "has no model.safetensors" in refusal(tmp_path)


def test_experts_are_not_quantised(tmp_path: Path) -> None:
    save_network(tmp_path, "mixtral")
    with pytest.raises(ModelError, match="int8 is not supported for the matrices of its experts"):
        load_any_model(tmp_path, torch.int8, CPU, None, None)


def test_several_ranks_are_refused_before_any_of_them_starts(tmp_path: Path) -> None:
    save_network(tmp_path, "gpt2")
    pool = PoolConfig(path=str(tmp_path), dtype=DType.FLOAT32, kv_blocks=8, tensor_parallel=2)

    def launch(jobs: list[RankJob]) -> Ranks:
        raise AssertionError("a rank was started")

    with pytest.raises(ModelError, match=r"tensor_parallel must be 1 .*model type 'gpt2'"):
        load_engine(pool, SpeculationConfig(), Device.CPU, launch)
