"""Draft heads with random weights beside tiny models, and their drafts by transformers' own layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from tests.model.architectures import tiny_config, tiny_model
from tests.model.checkpoints import Case
from tests.model.hybrids import build_hybrid


class Reference(NamedTuple):
    """A model with a draft head, as transformers' modules compute them."""

    model: Any
    read: Callable[[Any], Tensor]
    """Output of the model → what the head reads, (T, hidden)."""
    layer: Callable[[Tensor, Tensor], Tensor]
    """(hidden states, embeddings of the following tokens), both (T, hidden) → the head's states."""
    logits: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def states(
        self, ids: Sequence[int], own: Sequence[Tensor] = (), other: Mapping[int, int] | None = None
    ) -> Tensor:
        """The head's states of a sequence, (T - 1, hidden). The last tokens follow the states `own`.

        other : tokens by position, in place of those of the sequence where they follow another
        """
        known = len(ids) - len(own)
        output = self.model.model(torch.tensor([ids[:known]]), output_hidden_states=True)
        hidden = torch.cat([self.read(output)[: known - 1], *own])
        following = [(other or {}).get(place, token) for place, token in enumerate(ids)][1:]
        return self.layer(hidden, self.model.model.embed_tokens(torch.tensor(following)))

    @torch.no_grad()
    def drafts(self, ids: Sequence[int], count: int, other: Mapping[int, int] | None = None) -> list[int]:
        """The tokens that the head drafts greedily after `ids`."""
        found, own = list(ids), []
        for _ in range(count):
            state = self.states(found, own, other)[-1:]
            own.append(state)
            found.append(int(self.logits(state).argmax()))
        return found[len(ids) :]


def _randomise(module: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else 1 + noise * 0.1)
    return module.eval().requires_grad_(False)


def _run(layer: Any, model: Any, x: Tensor) -> Tensor:
    places = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None, None]
    out = layer(
        x[None], attention_mask=mask, position_ids=places, position_embeddings=model.rotary_emb(x, places)
    )
    return out[0] if out.dim() == 3 else out


def _add(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: each.contiguous() for name, each in tensors.items()}, path)


def _stored(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {prefix + name: each for name, each in module.state_dict().items()}


def write_glm(folder: Path) -> Reference:
    """GLM-4.5 with the layer for multi-token prediction behind its last layer, as DeepSeek-V3 has it."""
    config = tiny_config("glm4_moe", num_hidden_layers=2, bos_token_id=None)
    model = tiny_model(config)
    model.save_pretrained(folder)
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = 3
    layer = _randomise(Glm4MoeDecoderLayer(deeper, 2), 5)
    size = config.hidden_size
    norms = {name: _randomise(LlamaRMSNorm(size, config.rms_norm_eps), 6 + i) for i, name in enumerate("ehn")}
    fc = _randomise(nn.Linear(2 * size, size, bias=False), 9)
    at = "model.layers.2."
    _add(
        folder,
        _stored(at, layer)
        | _stored(f"{at}enorm.", norms["e"])
        | _stored(f"{at}hnorm.", norms["h"])
        | _stored(f"{at}eh_proj.", fc)
        | _stored(f"{at}shared_head.norm.", norms["n"])
        | {f"{at}shared_head.head.weight": model.lm_head.weight.clone()}
        | {f"{at}embed_tokens.weight": model.model.embed_tokens.weight.clone()},
    )
    return Reference(
        model,
        lambda output: output.last_hidden_state[0],
        lambda hidden, embedding: _run(
            layer, model.model, fc(torch.cat([norms["e"](embedding), norms["h"](hidden)], 1))
        ),
        lambda state: model.lm_head(norms["n"](state)),
    )


def write_qwen(folder: Path, case: Case) -> Reference:
    """Qwen3-Next or Qwen3.5 with the tensors `mtp.`."""
    model = build_hybrid(case, eos_token_id=256)
    model.save_pretrained(folder)
    config = copy.deepcopy(model.config)
    place = config.layer_types.index("full_attention")
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = []
    one = model.model.layers[place]
    layer = _randomise(type(one)(config, place), 5)
    norms = {name: type(one.input_layernorm)(config.hidden_size, config.rms_norm_eps) for name in "ehn"}
    for part in (layer, *norms.values()):
        for name, parameter in part.named_parameters():
            if "norm" in name or part is not layer:
                parameter.requires_grad_(False).copy_(0.1 * torch.randn(parameter.shape))
    fc = _randomise(nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False), 9)
    _add(
        folder,
        _stored("mtp.layers.0.", layer)
        | _stored("mtp.pre_fc_norm_embedding.", norms["e"])
        | _stored("mtp.pre_fc_norm_hidden.", norms["h"])
        | _stored("mtp.norm.", norms["n"])
        | _stored("mtp.fc.", fc),
    )

    def states(hidden: Tensor, embedding: Tensor) -> Tensor:
        x = fc(torch.cat([norms["e"](embedding), norms["h"](hidden)], 1))
        return norms["n"](_run(layer, model.model, x))

    return Reference(model, lambda output: output.last_hidden_state[0], states, model.lm_head)


def llama(layers: int = 5, **fields: Any) -> Any:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=256,
        bos_token_id=None,
        **fields,
    )
    torch.manual_seed(3)
    return _randomise(LlamaForCausalLM(config), 3)


def write_eagle3(model_folder: Path, folder: Path, *, part: bool = True, first: bool = False) -> Reference:
    """A Llama, and a folder with an EAGLE-3 head for it.

    part : the head proposes a part of the vocabulary
    first : the residual stream begins with the normed state, and config.json names the layers
    """
    model = llama()
    model.save_pretrained(model_folder)
    config, size = model.config, model.config.hidden_size
    layer = LlamaDecoderLayer(copy.deepcopy(config), 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = getattr(layer.self_attn, name).out_features
        setattr(layer.self_attn, name, nn.Linear(2 * size, rows, bias=False))
    _randomise(layer, 15)
    hidden_norm, norm = (_randomise(LlamaRMSNorm(size, config.rms_norm_eps), seed) for seed in (16, 17))
    fc = _randomise(nn.Linear(3 * size, size, bias=False), 18)
    tokens = torch.arange(0, 320, 2) + 1 if part else torch.arange(320)
    head = _randomise(nn.Linear(size, len(tokens), bias=False), 19)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _stored("midlayer.", layer) | _stored("midlayer.hidden_norm.", hidden_norm)
    tensors |= _stored("norm.", norm) | _stored("fc.", fc) | _stored("lm_head.", head)
    if part:
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.isin(torch.arange(320), tokens)
    save_file(tensors, folder / "model.safetensors")
    given = config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(tokens),
        "max_position_embeddings": 64,
    }
    places = (2, 2, 2)
    if first:
        places = (1, 2, 4)
        given |= {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": list(places)}
    else:
        given |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}
        places = (1, 2, 4)
    (folder / "config.json").write_text(json.dumps(given))

    def states(hidden: Tensor, embedding: Tensor) -> Tensor:
        normed = hidden_norm(hidden)
        both = torch.cat([layer.input_layernorm(embedding), normed], 1)
        mask = torch.full((len(both), len(both)), float("-inf")).triu(1)[None, None]
        turns = model.model.rotary_emb(both, torch.arange(len(both))[None])
        attended = layer.self_attn(both[None], position_embeddings=turns, attention_mask=mask)[0][0]
        stream = (normed if first else hidden) + attended
        return stream + layer.mlp(layer.post_attention_layernorm(stream))

    def logits(state: Tensor) -> Tensor:
        found = torch.full((len(state), 320), -1e4)
        found[:, tokens] = head(norm(state))
        return found

    def read(output: Any) -> Tensor:
        return fc(torch.cat([output.hidden_states[place][0] for place in places], 1))

    return Reference(model, read, states, logits)
