"""Test-time simulation of an EAGLE-3 head over packed rows: the decode loop's steps, trained all at once.

Slot p of a row reads the target's taps at p and the token x[p+1], and predicts x[p+2]. At simulated step s its own
output of step s-1 takes the place of the taps, tokens and targets move on by s, its RoPE position is p+s, and it
attends to the step-0 keys up to p and to its own keys of steps 1..s (EAGLE-3, arXiv:2503.01840, section 3.2).

1. `simulation_layout`: which slots count, and how packed rows become padded ones for attention alone
2. `Simulation.forward`: all steps; keys and values of step 0 for every slot, everything else for slots that count only
3. `Simulation.backward`: the closed-form gradients of all weights
What makes it fast: the half of q, k, v that comes from a token's embedding is computed once for all steps; attention to
own keys is s dot products; products that give weight gradients run once over all steps together, in one precision.

Shapes: N packed tokens, n slots that count (at step 0), S steps, D hidden size, H heads, Hkv key heads, Dh head size,
L tapped layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.eagle import EagleHead

MIN_LENGTH_RATIO = 0.6  # rows of one padded group are at least this share of its longest


@dataclass(frozen=True)
class Group:
    """Rows of similar length, padded to (B, Tq) query slots and (B, T) keys for attention."""

    slots: Tensor  # (B, Tq) into the n slots; padding repeats slot 0
    keys: Tensor  # (B, T) into the N tokens; padding repeats a real one and is masked
    mask: Tensor  # (B, Tq, T) bool: key slot at or before the query's slot, in its row
    is_slot: Tensor  # (B, Tq) bool


@dataclass(frozen=True)
class Layout:
    """Places of a packed batch; every Tensor int64 on the batch's device."""

    slots: Tensor  # (n,) packed position p of the slots that count at step 0, ascending
    num_steps: Tensor  # (n,) steps at which the slot counts, 1 .. S
    positions: Tensor  # (n,) position of the slot in its row
    tokens: Tensor  # (S, n) packed position of the token that slot and step read: p + 1 + s (clamped where not counted)
    groups: tuple[Group, ...]
    steps: int

    def counts(self) -> Tensor:  # (S,) slots that count at each step
        return (self.num_steps > torch.arange(self.steps, device=self.slots.device)[:, None]).sum(1)


def steps_of_slots(loss_mask: Tensor, row_offsets: Tensor, steps: int) -> Tensor:  # (N,) bool, (R+1,) -> (N,) int64
    """At how many steps each slot p counts: x[p+1] .. x[p+2+s] are all supervised and in p's row."""
    num_tokens = len(loss_mask)
    stops = ~loss_mask  # a run of supervised tokens ends before an unsupervised token, and before a row's first token
    starts = torch.zeros_like(loss_mask)
    starts[row_offsets[:-1].long()] = True
    index = torch.arange(num_tokens, device=loss_mask.device)
    # nearest stop at or after t, and nearest row start after t
    next_stop = _next_true(stops, index)
    next_start = torch.full_like(index, num_tokens)
    next_start[:-1] = _next_true(starts, index)[1:]
    run = torch.minimum(next_stop, next_start) - index  # (N,) supervised tokens from t on, in t's row
    result = torch.zeros_like(index)
    result[:-1] = (run[1:] - 1).clamp(0, steps) * ~starts[1:]
    return result


def _next_true(flags: Tensor, index: Tensor) -> Tensor:
    """Smallest i >= t with flags[i]; N where there is none."""
    places = torch.where(flags, index, len(flags))
    return places.flip(0).cummin(0).values.flip(0)


def simulation_layout(loss_mask: Tensor, row_offsets: Tensor, steps: int) -> Layout:  # (N,) bool, (R+1,)
    device, num_tokens = loss_mask.device, len(loss_mask)
    mask, offsets = loss_mask.cpu(), row_offsets.cpu().long()
    num_steps = steps_of_slots(mask, offsets, steps)  # (N,)
    slots = num_steps.nonzero().squeeze(1)  # (n,)
    lengths = offsets.diff()  # (R,)
    row_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[slots]  # (n,)
    tokens = (slots + 1 + torch.arange(steps)[:, None]).clamp(max=num_tokens - 1)  # (S, n)
    groups = _groups(slots, row_of, offsets)
    return Layout(
        slots.to(device),
        num_steps[slots].to(device),
        (slots - offsets[row_of]).to(device),
        tokens.to(device),
        tuple(Group(*(x.to(device) for x in (g.slots, g.keys, g.mask, g.is_slot))) for g in groups),
        steps,
    )


def _groups(slots: Tensor, row_of: Tensor, offsets: Tensor) -> list[Group]:
    if not len(slots):
        return []
    unique, counts = torch.unique_consecutive(row_of, return_counts=True)
    begins = counts.cumsum(0) - counts
    ends = slots[begins + counts - 1] + 1  # keys are needed up to the row's last slot
    lengths = ends - offsets[unique]
    order = torch.argsort(lengths, descending=True, stable=True)
    rows, first, count, lengths = unique[order], begins[order], counts[order], lengths[order]
    groups, start = [], 0
    while start < len(rows):
        end = start + int((lengths[start:] >= MIN_LENGTH_RATIO * lengths[start]).sum())
        part = slice(start, end)
        width, longest = int(count[part].max()), int(lengths[start])
        query = torch.arange(width)  # (Tq,)
        is_slot = query < count[part, None]  # (B, Tq)
        chosen = torch.where(is_slot, first[part, None] + query, first[part, None])  # (B, Tq)
        key = torch.arange(longest)  # (T,)
        is_key = key < lengths[part, None]  # (B, T)
        base = offsets[rows[part]][:, None]  # (B, 1)
        keys = torch.where(is_key, base + key, base)  # (B, T)
        mask = (key <= (slots[chosen] - base)[..., None]) & is_key[:, None]  # (B, Tq, T)
        groups.append(Group(chosen, keys, mask, is_slot))
        start = end
    return groups


class Weights:
    """The head's matrices in the compute dtype, cut and joined as the simulation uses them. Made once a batch."""

    def __init__(self, head: EagleHead, dtype: torch.dtype):
        attention, mlp, size = head.block.self_attn, head.block.mlp, head.config.hidden_size
        qkv = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]).to(dtype)
        self.num_q = attention.q_proj.out_features
        self.q_embed = qkv[: self.num_q, :size]  # (Q, D) views: a product takes them as they are
        self.kv_embed = qkv[self.num_q :, :size]  # (2 KV, D)
        self.qkv_hidden = qkv[:, size:]  # (Q + 2 KV, D)
        self.o = attention.o_proj.weight.to(dtype)
        self.gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).to(dtype)  # (2 I, D)
        self.down = mlp.down_proj.weight.to(dtype)
        self.fc = head.fc.weight.to(dtype)


class Simulation:
    """One packed batch through all steps of a head.

    dtype: of the large products and of what is kept for backward; the residual stream, norms and sums stay in fp32.
    """

    def __init__(self, head: EagleHead, layout: Layout, *, dtype: torch.dtype):
        c = head.config
        self.head, self.layout, self.dtype = head, layout, dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.num_kv, self.group_size, self.head_dim = (
            c.num_key_value_heads,
            c.num_attention_heads // c.num_key_value_heads,
            c.head_dim,
        )
        self.scale = c.head_dim**-0.5
        self.weights = Weights(head, dtype)

    def forward(self, input_ids: Tensor, taps: Tensor, *, keep: bool) -> Tensor:  # (N,), (N, L, D) -> (S, n, D)
        """Normed outputs of every step, in the compute dtype. keep: store what backward needs."""
        head, layout, w, eps = self.head, self.layout, self.weights, self.head.config.rms_norm_eps
        block, num_slots, steps = head.block, len(layout.slots), layout.steps
        size, num_q = head.config.hidden_size, w.num_q
        num_kv = self.num_kv * self.head_dim
        embedded = head.embed_tokens.weight[input_ids].to(self.wide)  # (N, D)
        embedded = rms_norm(embedded, block.input_layernorm.weight, eps, self.dtype)
        used, self.place = torch.unique(layout.tokens, return_inverse=True)  # tokens that some slot reads
        q_embed = embedded[used] @ w.q_embed.T  # (u, Q)
        kv_embed = embedded @ w.kv_embed.T  # (N, 2 KV)
        taps = (taps.flatten(1) * head.tap_scale).to(self.dtype)  # (N, 3D)
        state = (taps @ w.fc.T).to(self.wide)  # (N, D) g, the residual of step 0
        normed = rms_norm(state, block.hidden_norm.weight, eps, self.dtype)
        kv = normed @ w.qkv_hidden[num_q:].T  # (N, 2 KV)
        kv[:-1] += kv_embed[1:]  # slot p reads token p + 1
        positions = torch.arange(len(input_ids), device=input_ids.device)
        self.keys_rope = self._rope(positions - self._row_start(input_ids))
        keys = self._rotate(kv[:, :num_kv], self.keys_rope)  # (N, KV)
        values = kv[:, num_kv:]
        padded = [(self._pad_keys(keys, g), self._pad_keys(values, g)) for g in layout.groups]

        stored = {
            "normed": self._stack(size),
            "out": self._stack(w.o.shape[1]),
            "mlp_in": self._stack(size),
            "act": self._stack(w.down.shape[1]),
        }
        stored["gate_up"] = self._stack(w.gate_up.shape[0])
        outputs = self._stack(size)  # (S, n, D)
        hiddens, middles, ropes, queries, own, probs = [], [], [], [], [], []
        hidden = state[layout.slots]  # (n, D)
        for step in range(steps):
            hiddens.append(hidden)
            if step == 0:
                stored["normed"][0] = normed[layout.slots]
                q = stored["normed"][0] @ w.qkv_hidden[:num_q].T  # (n, Q)
            else:
                stored["normed"][step] = rms_norm(hidden, block.hidden_norm.weight, eps, self.dtype)
                qkv = stored["normed"][step] @ w.qkv_hidden.T  # (n, Q + 2 KV)
                q = qkv[:, :num_q]
                kv = qkv[:, num_q:] + kv_embed[layout.tokens[step]]  # (n, 2 KV)
            q = q + q_embed[self.place[step]]
            ropes.append(self._rope(layout.positions + step))
            q = self._rotate(q, ropes[-1]).view(num_slots, self.num_kv, self.group_size, self.head_dim)
            if step:
                own.append(
                    (
                        self._rotate(kv[:, :num_kv], ropes[-1]).view(num_slots, self.num_kv, 1, self.head_dim),
                        kv[:, num_kv:].reshape(num_slots, self.num_kv, 1, self.head_dim),
                    )
                )
            queries.append(q)
            probs.append(self._attend(q, padded, own, stored["out"][step]))
            middle = (stored["out"][step] @ w.o.T).to(self.wide).add_(hidden)  # (n, D)
            middles.append(middle)
            stored["mlp_in"][step] = rms_norm(middle, block.post_attention_layernorm.weight, eps, self.dtype)
            torch.mm(stored["mlp_in"][step], w.gate_up.T, out=stored["gate_up"][step])
            gate, up = stored["gate_up"][step].chunk(2, dim=-1)  # (n, I) twice
            torch.mul(torch.nn.functional.silu(gate), up, out=stored["act"][step])
            hidden = (stored["act"][step] @ w.down.T).to(self.wide).add_(middle)  # (n, D)
            outputs[step] = rms_norm(hidden, head.norm.weight, eps, self.dtype)
        hiddens.append(hidden)
        if keep:
            streams = (hiddens, middles)
            self.kept = (input_ids, embedded, used, taps, state, padded, stored, streams, ropes, queries, own, probs)
        return outputs

    def backward(self, grad_outputs: Tensor) -> dict[str, Tensor]:  # (S, n, D) -> by parameter name, in the wide dtype
        """Gradients of all trained weights of the block from those of `forward`'s outputs."""
        head, layout, w, eps, wide = self.head, self.layout, self.weights, self.head.config.rms_norm_eps, self.wide
        block, num_slots, steps = head.block, len(layout.slots), layout.steps
        size, num_q, num_kv = head.config.hidden_size, w.num_q, self.num_kv * self.head_dim
        input_ids, embedded, used, taps, state, padded, stored, streams, ropes, queries, own, probs = self.kept
        (hiddens, middles), self.kept = streams, None
        grads = {name: torch.zeros_like(p, dtype=wide) for name, p in norm_weights(head).items()}
        grad = {
            "qkv": self._stack(num_q + 2 * num_kv),
            "o": self._stack(size),
            "gate_up": self._stack(w.gate_up.shape[0]),
            "down": self._stack(size),
        }
        grad_q_embed = torch.zeros(len(used), num_q, dtype=wide, device=taps.device)
        grad_kv_embed = torch.zeros(len(input_ids), 2 * num_kv, dtype=wide, device=taps.device)
        grad_keys = [tuple(torch.zeros_like(x, dtype=wide) for x in pair) for pair in padded]
        grad_own = [tuple(torch.zeros_like(x, dtype=wide) for x in pair) for pair in own]
        grad_hidden = torch.zeros(num_slots, size, dtype=wide, device=taps.device)
        for step in reversed(range(steps)):
            grad_hidden += rms_norm_backward(
                grad_outputs[step], hiddens[step + 1], head.norm.weight, eps, grads["norm"]
            )
            grad["down"][step] = grad_hidden
            grad_act = grad["down"][step] @ w.down  # (n, I)
            swiglu_backward(grad_act, stored["gate_up"][step], out=grad["gate_up"][step])
            grad_mlp_in = grad["gate_up"][step] @ w.gate_up  # (n, D)
            norm = block.post_attention_layernorm.weight
            grad_hidden += rms_norm_backward(grad_mlp_in, middles[step], norm, eps, grads["post_attention_layernorm"])
            grad["o"][step] = grad_hidden
            grad_out = grad["o"][step] @ w.o  # (n, Q)
            grad_q = self._attend_backward(
                grad_out, queries[step], padded, own[:step], probs[step], grad_keys, grad_own[:step]
            )  # (n, Q)
            grad_qkv = grad["qkv"][step]
            grad_qkv[:, :num_q] = self._rotate(grad_q, ropes[step], inverse=True)
            grad_q_embed.index_add_(0, self.place[step], grad_qkv[:, :num_q].to(wide))
            if step == 0:
                break
            own_keys, own_values = grad_own[step - 1]
            grad_qkv[:, num_q : num_q + num_kv] = self._rotate(
                own_keys.reshape(num_slots, -1), ropes[step], inverse=True
            )
            grad_qkv[:, num_q + num_kv :] = own_values.reshape(num_slots, -1)
            grad_kv_embed.index_add_(0, layout.tokens[step], grad_qkv[:, num_q:].to(wide))
            grad_normed = grad_qkv @ w.qkv_hidden  # (n, D)
            norm = block.hidden_norm.weight
            grad_hidden += rms_norm_backward(grad_normed, hiddens[step], norm, eps, grads["hidden_norm"])

        # step 0: keys and values of every slot, queries of those that count
        keys = torch.zeros(len(input_ids), num_kv, dtype=wide, device=taps.device)
        values = torch.zeros_like(keys)
        for group, (grad_k, grad_v) in zip(layout.groups, grad_keys):
            for total, part in ((keys, grad_k), (values, grad_v)):
                rows = part.squeeze(2).transpose(1, 2).flatten(2)  # (B, Hkv, 1, T, Dh) -> (B, T, KV)
                total.index_add_(0, group.keys.flatten(), rows.flatten(0, 1))  # masked keys have zeros
        kv = torch.cat((self._rotate(keys, self.keys_rope, inverse=True), values), dim=1).to(self.dtype)  # (N, 2 KV)
        grad_kv_embed[1:] += kv[:-1]
        grad_normed = (kv @ w.qkv_hidden[num_q:]).to(wide)  # (N, D)
        grad_normed.index_add_(0, layout.slots, (grad["qkv"][0][:, :num_q] @ w.qkv_hidden[:num_q]).to(wide))
        grad_state = rms_norm_backward(grad_normed, state, block.hidden_norm.weight, eps, grads["hidden_norm"])
        grad_state.index_add_(0, layout.slots, grad_hidden)

        normed = rms_norm(state, block.hidden_norm.weight, eps, self.dtype)  # (N, D)
        grad_qkv_hidden = torch.zeros(num_q + 2 * num_kv, size, dtype=wide, device=taps.device)
        grad_qkv_hidden[:num_q] = weight_grad(grad["qkv"][..., :num_q], stored["normed"])
        grad_qkv_hidden[num_q:] = weight_grad(kv, normed)
        if steps > 1:
            grad_qkv_hidden[num_q:] += weight_grad(grad["qkv"][1:, :, num_q:], stored["normed"][1:])
        grad_q_embed, grad_kv_embed = grad_q_embed.to(self.dtype), grad_kv_embed.to(self.dtype)
        grad_qkv_embed = torch.cat((weight_grad(grad_q_embed, embedded[used]), weight_grad(grad_kv_embed, embedded)))
        grad_embedded = (grad_kv_embed @ w.kv_embed).to(wide)  # (N, D) only the norm's gain learns from it
        grad_embedded.index_add_(0, used, (grad_q_embed @ w.q_embed).to(wide))
        raw = head.embed_tokens.weight[input_ids].to(wide)
        rms_norm_backward(grad_embedded, raw, block.input_layernorm.weight, eps, grads["input_layernorm"])

        grad_qkv = torch.cat((grad_qkv_embed.to(wide), grad_qkv_hidden), dim=1)  # (Q + 2 KV, 2D)
        attention = block.self_attn
        splits = [p.out_features for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        grad_gate_up = weight_grad(grad["gate_up"], stored["mlp_in"])
        grads |= dict(zip(("q_proj", "k_proj", "v_proj"), grad_qkv.split(splits)))
        grads |= dict(zip(("gate_proj", "up_proj"), grad_gate_up.chunk(2)))
        grads["o_proj"] = weight_grad(grad["o"], stored["out"])
        grads["down_proj"] = weight_grad(grad["down"], stored["act"])
        grads["fc"] = weight_grad(grad_state.to(self.dtype), taps)
        return {name: value.to(wide) for name, value in grads.items()}

    # --- attention ---------------------------------------------------------------------------------------------------

    def _attend(
        self,
        q: Tensor,  # (n, Hkv, G, Dh)
        padded: list[tuple[Tensor, Tensor]],  # keys, values (B, Hkv, 1, T, Dh) of each group
        own: list[tuple[Tensor, Tensor]],  # (n, Hkv, 1, Dh) of steps 1 .. s
        out: Tensor,  # (n, Q) written
    ) -> list[Tensor]:  # (B, Hkv, G, Tq, T + s) probabilities of each group
        own_scores = torch.stack([(q * k).sum(-1) for k, _ in own], dim=-1) if own else None  # (n, Hkv, G, s)
        kept = []
        for group, (keys, values) in zip(self.layout.groups, padded):
            queries = self._pad_slots(q, group)  # (B, Hkv, G, Tq, Dh)
            batch, _, _, width, _ = queries.shape
            num_keys = keys.shape[3]
            scores = queries.flatten(2, 3) @ keys.squeeze(2).transpose(-1, -2)  # (B, Hkv, G * Tq, T)
            scores = scores.view(batch, self.num_kv, self.group_size, width, num_keys)
            scores.masked_fill_(~group.mask[:, None, None], -torch.inf)
            if own_scores is not None:
                extra = self._pad_slots(own_scores, group)  # (B, Hkv, G, Tq, s)
                scores = torch.cat((scores, extra), dim=-1)
            probs = torch.softmax(scores.mul_(self.scale), dim=-1)
            kept.append(probs)
            mixed = probs[..., :num_keys].flatten(2, 3) @ values.squeeze(2)  # (B, Hkv, G * Tq, Dh)
            self._unpad_slots(mixed.view(batch, self.num_kv, self.group_size, width, -1), group, out)
        if own:
            own_probs = self._unpad_probs(kept, len(own))  # (n, Hkv, G, s)
            mixed = out.view(len(out), self.num_kv, self.group_size, self.head_dim)
            for i, (_, v) in enumerate(own):
                mixed.addcmul_(own_probs[..., i, None], v)
        return kept

    def _attend_backward(
        self,
        grad_out: Tensor,  # (n, Q)
        q: Tensor,  # (n, Hkv, G, Dh)
        padded: list[tuple[Tensor, Tensor]],
        own: list[tuple[Tensor, Tensor]],
        probs: list[Tensor],
        grad_keys: list[tuple[Tensor, ...]],  # added to, (B, Hkv, 1, T, Dh)
        grad_own: list[tuple[Tensor, ...]],  # added to, (n, Hkv, 1, Dh)
    ) -> Tensor:  # (n, Q)
        grad_out = grad_out.view(len(grad_out), self.num_kv, self.group_size, self.head_dim)
        own_grads = None
        if own:
            own_grads = torch.stack([(grad_out * v).sum(-1) for _, v in own], dim=-1)  # (n, Hkv, G, s)
        grad_q = torch.empty(len(q), q[0].numel(), dtype=q.dtype, device=q.device)
        own_score_grads = []
        for group, (keys, values), p, (grad_k, grad_v) in zip(self.layout.groups, padded, probs, grad_keys):
            grad_mixed = self._pad_slots(grad_out, group).flatten(2, 3)  # (B, Hkv, G * Tq, Dh)
            grad_mixed = grad_mixed * self._is_slot(group, grad_mixed.dtype)
            batch, num_keys = len(p), keys.shape[3]
            grad_p = grad_mixed @ values.squeeze(2).transpose(-1, -2)  # (B, Hkv, G * Tq, T)
            grad_p = grad_p.view(batch, self.num_kv, self.group_size, -1, num_keys)
            if own:
                grad_p = torch.cat((grad_p, self._pad_slots(own_grads, group)), dim=-1)
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(self.scale)
            if own:
                own_score_grads.append(grad_scores[..., num_keys:])
            to_keys = grad_scores[..., :num_keys].flatten(2, 3)  # (B, Hkv, G * Tq, T)
            queries = self._pad_slots(q, group).flatten(2, 3)
            self._unpad_slots((to_keys @ keys.squeeze(2)).view(batch, self.num_kv, self.group_size, -1, self.head_dim),
                              group, grad_q)  # fmt: skip
            to_keys = to_keys * self._is_slot(group, to_keys.dtype)
            grad_k.squeeze(2).add_(to_keys.transpose(-1, -2) @ queries)
            grad_v.squeeze(2).add_(p[..., :num_keys].flatten(2, 3).transpose(-1, -2) @ grad_mixed)
        if own:
            own_probs = self._unpad_probs(probs, len(own))  # (n, Hkv, G, s)
            own_scores = self._unpad_probs(own_score_grads, len(own))
            shaped = grad_q.view(q.shape)
            for i, ((k, _), (grad_k, grad_v)) in enumerate(zip(own, grad_own)):
                shaped.addcmul_(own_scores[..., i, None], k)
                grad_k += (own_scores[..., i, None] * q).sum(2, keepdim=True)
                grad_v += (own_probs[..., i, None] * grad_out).sum(2, keepdim=True)
        return grad_q

    def _pad_keys(self, x: Tensor, group: Group) -> Tensor:  # (N, KV) -> (B, Hkv, 1, T, Dh)
        rows = x[group.keys].unflatten(-1, (self.num_kv, self.head_dim))  # (B, T, Hkv, Dh)
        return rows.transpose(1, 2).contiguous()[:, :, None]

    def _pad_slots(self, x: Tensor, group: Group) -> Tensor:  # (n, Hkv, G, w) -> (B, Hkv, G, Tq, w)
        return x[group.slots].permute(0, 2, 3, 1, 4).contiguous()

    def _unpad_slots(self, x: Tensor, group: Group, out: Tensor) -> None:  # (B, Hkv, G, Tq, Dh) -> rows of (n, Q)
        out[group.slots[group.is_slot]] = x.permute(0, 3, 1, 2, 4)[group.is_slot].flatten(1)

    def _unpad_probs(self, kept: list[Tensor], steps: int) -> Tensor:  # (n, Hkv, G, s)
        first = kept[0]
        out = first.new_empty(len(self.layout.slots), self.num_kv, self.group_size, steps)
        for group, probs in zip(self.layout.groups, kept):
            extra = probs[..., probs.shape[-1] - steps :].permute(0, 3, 1, 2, 4)  # (B, Tq, Hkv, G, s)
            out[group.slots[group.is_slot]] = extra[group.is_slot]
        return out

    def _is_slot(self, group: Group, dtype: torch.dtype) -> Tensor:  # (B, 1, G * Tq, 1)
        return group.is_slot[:, None].expand(-1, self.group_size, -1).flatten(1)[:, None, :, None].to(dtype)

    # --- positions ---------------------------------------------------------------------------------------------------

    def _stack(self, width: int) -> Tensor:  # (S, n, width) to be filled step by step
        shape = (self.layout.steps, len(self.layout.slots), width)
        return torch.empty(shape, dtype=self.dtype, device=self.layout.slots.device)

    def _row_start(self, input_ids: Tensor) -> Tensor:  # (N,) packed position of each token's row
        # unused tokens get position 0: some rotations depend on the largest
        starts = torch.arange(len(input_ids), device=input_ids.device)
        for group in self.layout.groups:
            starts[group.keys] = group.keys[:, :1]
        return starts

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # (T,) -> cos, sin (T, 1, Dh)
        like = torch.empty(0, dtype=self.wide, device=positions.device)
        cos, sin = self.head.rotary(like, positions[None].clamp(min=0))
        return cos[0, :, None].to(self.dtype), sin[0, :, None].to(self.dtype)

    def _rotate(self, x: Tensor, rope: tuple[Tensor, Tensor], *, inverse: bool = False) -> Tensor:  # (T, heads * Dh)
        cos, sin = rope
        heads = x.unflatten(-1, (-1, self.head_dim))  # (T, H, Dh)
        left, right = heads.chunk(2, dim=-1)
        turned = torch.cat((right, -left), dim=-1) if inverse else torch.cat((-right, left), dim=-1)
        return (heads * cos).addcmul_(turned, sin).flatten(1)


# --- pieces --------------------------------------------------------------------------------------------------------


def norm_weights(head: EagleHead) -> dict[str, Tensor]:
    block = head.block
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {**{name: getattr(block, name).weight for name in names}, "norm": head.norm.weight}


def trained_weights(head: EagleHead) -> dict[str, Tensor]:
    """Parameters that `Simulation.backward` gives gradients for, under its names."""
    attention, mlp = head.block.self_attn, head.block.mlp
    linears = {name: getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    linears |= {name: getattr(mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj")}
    return {"fc": head.fc.weight, **linears, **norm_weights(head)}


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:  # (..., out), (..., in) -> (out, in)
    """All steps in one product."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


def rms_norm(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:  # (T, D)
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)  # (T, 1)
    return (x * inverse).mul_(gain).to(dtype)


def rms_norm_backward(grad: Tensor, x: Tensor, gain: Tensor, eps: float, grad_gain: Tensor) -> Tensor:  # (T, D)
    """Gradient of x; that of the gain is added to grad_gain."""
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)  # (T, 1)
    unit = x * inverse  # (T, D)
    grad = grad.to(x.dtype)
    grad_gain += (grad * unit).sum(0)
    grad_unit = grad * gain
    along = (grad_unit * unit).mean(-1, keepdim=True)
    return grad_unit.sub_(unit.mul_(along)).mul_(inverse)


def swiglu_backward(grad: Tensor, gate_up: Tensor, *, out: Tensor) -> None:  # (T, I), (T, 2I) -> out (T, 2I)
    """Gradient of silu(gate) * up, written to out."""
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.mul(grad, torch.nn.functional.silu(gate), out=grad_up)
    grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
