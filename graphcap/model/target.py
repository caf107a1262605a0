"""The frozen target: features of a row for training, verification with a cache for decoding, its embedding and head.

transformers runs the layers, but for rows of plain decoders (model/lean.py); attention is ours. We register one attention
function, which hands queries, keys and values to the `attend` object that the caller passed into the forward: `RowAttention`
keeps the documents of a row apart, `KeyValueCache` continues one sequence. transformers then builds no mask and no cache of
its own, so nothing in a forward branches on the host, and rolling back a rejected draft is setting a length.

Calls: engine/step.py, model/decode.py, train.py, eval.py. Loading: model/loading.py.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcap.errors import ConfigError
from graphcap.model.attention import TILE, attention_for
from graphcap.model.blocks import row_visibility
from graphcap.model.lean import LeanLayers, adds_the_same, is_known

ATTENTION = "graphcap"
REFUSED = {"softcap": "attention scores", "final_logit_softcapping": "logits", "attn_logit_softcapping": "attention scores"}


def _attend(module, query, key, value, attention_mask, *, scaling=None, sliding_window=None, attend=None, **other):
    """The attention function registered with transformers. query: [1, H, S, C]; returns [1, S, H, C]."""
    for name, what in REFUSED.items():
        if other.get(name) is not None:
            raise ConfigError(
                "target",
                type(module).__name__,
                expected="plain softmax attention",
                got=f"{name} on its {what}",
                fix="use a target without it; graphcap's attention cannot reproduce it",
            )
    if other.get("s_aux") is not None:
        raise ConfigError(
            "target",
            type(module).__name__,
            expected="plain softmax attention",
            got="attention sinks",
            fix="use a target without them",
        )
    if attend is None:
        raise ConfigError(
            "target",
            type(module).__name__,
            expected="a forward that passes keyword arguments to its attention",
            got="a forward that drops them",
            fix="use a dense causal language model such as Llama, Qwen3 or Gemma 3",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_HSC = attend(module.layer_idx, query[0], key[0], value[0], scale, sliding_window)
    return out_HSC.transpose(0, 1)[None], None


class RowAttention:
    """Causal attention inside each document of one row; one mask per window size, made on first use in a forward."""

    def __init__(self, position_T: Tensor, attention) -> None:
        self.position_T, self.attention, self.masks = position_T, attention, {}

    def __call__(self, layer: int, q_HTC: Tensor, k_GTC: Tensor, v_GTC: Tensor, scale: float, window: int | None) -> Tensor:
        if window not in self.masks:
            visibility = row_visibility(self.position_T, window=window)
            self.masks[window] = self.attention.mask(visibility, self.position_T.numel())
        return self.attention(q_HTC, (k_GTC, v_GTC), None, self.masks[window], scale)


class KeyValueCache:
    """Keys and values of one sequence in every layer, up to `max_length` tokens.

    A forward over n tokens writes them behind the first `length`; the caller then sets `length` to what it keeps.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def positions(self, token_ids_N: Tensor) -> Tensor:
        """Where the next tokens stand: int64 [N]."""
        return torch.arange(self.length, self.length + token_ids_N.numel(), device=token_ids_N.device)

    def __call__(self, layer: int, q_HNC: Tensor, k_GNC: Tensor, v_GNC: Tensor, scale: float, window: int | None) -> Tensor:
        if layer not in self.keys:
            shape = (k_GNC.shape[0], self.max_length, k_GNC.shape[2])
            self.keys[layer], self.values[layer] = k_GNC.new_empty(shape), v_GNC.new_empty(shape)
        start, end = self.length, self.length + k_GNC.shape[1]
        assert end <= self.max_length, f"cache of {self.max_length} tokens got {end}"
        self.keys[layer][:, start:end] = k_GNC
        self.values[layer][:, start:end] = v_GNC
        first = 0 if window is None else max(0, start + 1 - window)  # no query of this forward sees a key before it
        k, v = self.keys[layer][:, first:end], self.values[layer][:, first:end]
        gqa = q_HNC.shape[0] != k.shape[0]
        mask = self._mask(start, end, first, window, q_HNC.device)
        return F.scaled_dot_product_attention(q_HNC[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=gqa)[0]

    @staticmethod
    def _mask(start: int, end: int, first: int, window: int | None, device: torch.device) -> Tensor | None:
        if end - start == 1:
            return None
        query = torch.arange(start, end, device=device)[:, None]
        key = torch.arange(first, end, device=device)[None, :]
        return (key <= query) if window is None else (key <= query) & (query - key < window)


class Target:
    """A frozen causal language model with taps: its features are the outputs of `target_layer_ids`, side by side."""

    def __init__(self, model: nn.Module, target_layer_ids: tuple[int, ...]) -> None:
        """model: of transformers, with a `get_decoder()` whose `layers` are the decoder layers."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attend)
        model.set_attn_implementation(ATTENTION)
        for name, what in REFUSED.items():
            if getattr(model.config.get_text_config(), name, None) is not None:
                raise ConfigError(
                    "target",
                    model.config.model_type,
                    expected=f"plain {what}",
                    got=f"{name} in its config",
                    fix="use a target without it; the drafter's loss would be on other numbers than serving",
                )
        self.model = model
        self.target_layer_ids = tuple(target_layer_ids)
        decoder = model.get_decoder()
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head_VD: Tensor = model.get_output_embeddings().weight
        self.hidden_size = self.head_VD.shape[1]
        self.attention = attention_for(self.head_VD.device)
        self._sink_SF: Tensor | None = None
        self._lean: LeanLayers | None = None
        known = is_known(decoder)
        for place, layer_id in enumerate(self.target_layer_ids):
            decoder.layers[layer_id].register_forward_hook(self._tap(place))
        self._body = _first_layers(decoder, self.target_layer_ids[-1] + 1)
        self._check_head()
        if known:
            self._lean = self._checked_lean(decoder)

    @property
    def is_lean(self) -> bool:
        """Whether rows run through model/lean.py, not through transformers' layers; hooks on layers then do not run."""
        return self._lean is not None

    @property
    def num_features(self) -> int:
        """F = L·D."""
        return len(self.target_layer_ids) * self.hidden_size

    def embed(self, token_ids_S: Tensor) -> Tensor:
        """Input embeddings [S, D] of token ids [S]."""
        return self.embedding(token_ids_S)

    @torch.no_grad()
    def features(self, token_ids_T: Tensor, position_T: Tensor, out_TF: Tensor) -> None:
        """Write the tapped layers' outputs for one row into out_TF, [T, L·D] in the target's dtype.

        token_ids_T, position_T: int [T]; positions restart at 0 with each document, which is what keeps documents apart.
        Layers above the last tapped one do not run. Capture: safe.
        """
        if self._lean is not None:
            self._run_lean(self._lean, token_ids_T, position_T, out_TF)
            return
        self._run(token_ids_T, position_T, out_TF)

    def _run_lean(self, lean: LeanLayers, token_ids_T: Tensor, position_T: Tensor, out_TF: Tensor) -> None:
        taps = {layer_id: out_TF[:, self._part(place)] for place, layer_id in enumerate(self.target_layer_ids)}
        lean.features(token_ids_T.long(), position_T.long(), RowAttention(position_T, self.attention), taps)

    def _run(self, token_ids_T: Tensor, position_T: Tensor, out_TF: Tensor) -> None:
        """By transformers' own forward."""
        self._sink_SF = out_TF
        try:
            self._body(
                input_ids=token_ids_T.long()[None],
                position_ids=position_T.long()[None],
                use_cache=False,
                attend=RowAttention(position_T, self.attention),
            )
        finally:
            self._sink_SF = None

    @torch.no_grad()
    def extend(self, token_ids_S: Tensor, cache: KeyValueCache, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Run the whole target over the next tokens of a sequence.

        token_ids_S: int64 [S], at positions cache.length …; the cache holds them afterwards, but `length` is the caller's.
        Returns float32 logits [S, V] (only the last row with `last_only`) and features [S, L·D].
        """
        position_S = cache.positions(token_ids_S)
        self._sink_SF = self.head_VD.new_empty(token_ids_S.numel(), self.num_features)
        try:
            out = self.model(
                input_ids=token_ids_S[None],
                position_ids=position_S[None],
                use_cache=False,
                attend=cache,
                logits_to_keep=1 if last_only else 0,
            )
            return out.logits[0].float(), self._sink_SF
        finally:
            self._sink_SF = None

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a target whose logits are not its last hidden states times its head: the drafter's would mean another thing.

        A bias of the head, a logit scale and whatever else stands between are found by trying four tokens.
        """
        token_ids = torch.arange(4, device=self.head_VD.device)
        position = token_ids[None]
        caches = KeyValueCache(4), KeyValueCache(4)
        hidden = self.model.get_decoder()(input_ids=position, position_ids=position, use_cache=False, attend=caches[0])
        expected = (hidden.last_hidden_state[0] @ self.head_VD.T).float()
        logits = self.extend(token_ids, caches[1])[0]
        if (logits - expected).norm() > 0.01 * expected.norm() + 1e-6:
            raise ConfigError(
                "target",
                self.model.config.model_type,
                expected="logits that are its last hidden states times its head",
                got="other logits",
                cause="a bias, a scale or a cap stands between them",
                fix="use a target without it",
            )

    @torch.no_grad()
    def _checked_lean(self, decoder: nn.Module) -> LeanLayers | None:
        """Lean layers if on two short documents each does what transformers' does, and all together in the target's dtype."""
        device, dtype, num_layers = self.head_VD.device, self.head_VD.dtype, self.target_layer_ids[-1] + 1
        position = torch.cat((torch.arange(77, device=device), torch.arange(TILE - 77, device=device)))
        attend = RowAttention(position, self.attention)
        if not all(adds_the_same(layer, decoder.rotary_emb, attend, position) for layer in decoder.layers[:num_layers]):
            return None
        lean = LeanLayers(decoder, num_layers)
        token_ids = torch.arange(TILE, device=device) * 131 % self.head_VD.shape[0]
        ours, theirs = (self.head_VD.new_empty(TILE, self.num_features) for _ in range(2))
        self._run(token_ids, position, theirs)
        self._run_lean(lean, token_ids, position, ours)
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        return lean if difference <= (0.05 if dtype.itemsize < 4 else 1e-4) else None  # rounding adds up over layers

    def _part(self, place: int) -> slice:
        return slice(place * self.hidden_size, (place + 1) * self.hidden_size)

    def _tap(self, place: int):
        part = self._part(place)

        def write(module, arguments, output):
            if self._sink_SF is not None:
                self._sink_SF[:, part] = (output[0] if isinstance(output, tuple) else output)[0]

        write.is_tap = True
        return write


def _first_layers(decoder: nn.Module, num_layers: int) -> nn.Module:
    """The same decoder, sharing every parameter, with its first layers only and no final norm."""
    body = copy.copy(decoder)
    body._modules = dict(decoder._modules)
    body.layers = decoder.layers[:num_layers]
    body.norm = nn.Identity()
    return body
