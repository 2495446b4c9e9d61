# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Continuous batching of the conversations that are ready, with caches kept across turns.

Synchronous code: `submit` requests, then call `step` until none is left. In each step every admitted request
advances by its pending tokens: a new observation, or the token just sampled. Prefixes that conversations
share (policy and tool schemas) are found automatically and computed once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch

from trialogue.engine.api import Completion, SamplingParams, StopReason
from trialogue.engine.attention import ModelAdapter
from trialogue.engine.cache import Piece, Prefix, Slab, StepPlan
from trialogue.engine.draw import draw_tokens, uniform_noise
from trialogue.engine.prefixes import best_shared_prefix, common_length
from trialogue.errors import EngineError

SHORT_PREFIX = 128
"""Tokens below which a prefix is copied into slots: attending to it separately costs more than it saves."""


@dataclass(slots=True, eq=False)
class SamplingRequest:
    """One completion being sampled. `sequence` is the prompt plus the sampled tokens."""

    sequence: list[int]
    params: SamplingParams
    session: str | None
    seed: int
    prompt_length: int = 0
    logprobs: list[float] = field(default_factory=list)
    cache: Cached | None = None
    stop_tokens: frozenset[int] = frozenset()
    cancelled: bool = False
    completion: Completion | None = None
    error: EngineError | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.sequence)
        self.stop_tokens = frozenset(self.params.stop_tokens)


@dataclass(slots=True, eq=False)
class Cached:
    """The cache of a conversation: its computed `tokens`, the first in `prefix`, the others in `slot`."""

    tokens: list[int] = field(default_factory=list)
    slot: int = -1
    prefix: Prefix | None = None
    request: SamplingRequest | None = None
    used: int = 0

    @property
    def own_length(self) -> int:
        return len(self.tokens) - (len(self.prefix.tokens) if self.prefix else 0)


class BatchSampler:
    """Samples completions for requests. Not thread-safe."""

    def __init__(
        self,
        adapted: ModelAdapter,
        device: torch.device,
        *,
        cache_bytes: int,
        prefill_chunk: int,
        keep_sessions: bool = True,
        share_prefixes: bool = True,
        shortest_prefix: int = 32,
    ) -> None:
        self.adapted, self.device = adapted, device
        self.cache_bytes, self.prefill_chunk = cache_bytes, prefill_chunk
        self.keep_sessions, self.share_prefixes = keep_sessions, share_prefixes
        self.shortest_prefix = shortest_prefix
        self.weight_version = 0
        self.waiting: list[SamplingRequest] = []
        self.active: list[SamplingRequest] = []
        self.computed_tokens = 0
        self.copying = True
        self.drop_caches()

    def drop_caches(self) -> None:
        """Drop everything computed, after a change of weights. Active requests start again."""
        self.adapted.forget()
        fast = self.adapted.fast
        kernels = None if fast is None else fast.find_step_kernels(self.adapted.shapes)
        self.slab = Slab(self.adapted.shapes, 0, 0, self.device, kernels)
        self.free: list[int] = []
        self.sessions: dict[str, Cached] = {}
        self.prefixes: list[Prefix] = []
        self.clock = 0
        self.waiting[:0] = self.active
        self.active.clear()
        for request in self.waiting:
            request.cache = None

    @property
    def token_bytes(self) -> int:
        return self.slab.token_bytes

    def reset(self) -> None:
        """Drop the caches and all requests, after a failure."""
        self.waiting.clear()
        self.active.clear()
        self.drop_caches()

    def submit(self, request: SamplingRequest) -> None:
        self.waiting.append(request)

    def end_session(self, session: str) -> None:
        cached = self.sessions.pop(session, None)
        if cached is not None and cached.request is None:
            self._release(cached)

    def step(self) -> list[SamplingRequest]:
        """Advance every request that fits; returns those that ended, with a completion or an error."""
        self.clock += 1
        for request in [request for request in self.active if request.cancelled]:
            self._finish(request)
        self.waiting = [request for request in self.waiting if not request.cancelled]
        with torch.inference_mode():
            ended = self._admit()
            pieces = self._compose(ended)
            if pieces:
                ended.extend(self._advance(pieces))
        return ended

    # -- admission -------------------------------------------------------------------------------------

    def _admit(self) -> list[SamplingRequest]:
        """Move requests from waiting to active, as far as memory allows."""
        ended: list[SamplingRequest] = []
        blocked: list[SamplingRequest] = []
        fresh: list[SamplingRequest] = []
        ready: list[SamplingRequest] = []
        for request in self.waiting:
            cached = self.sessions.get(request.session) if request.session is not None else None
            if cached is None:
                cached = Cached()
                if request.session is not None:
                    self.sessions[request.session] = cached
            if cached.request is not None:
                blocked.append(request)
                continue
            # At least one token must be computed, to have logits.
            kept = min(common_length(cached.tokens, request.sequence), len(request.sequence) - 1)
            shared = len(cached.prefix.tokens) if cached.prefix else 0
            if cached.slot < 0 or kept < max(shared, 1) or not self.keep_sessions:
                self._release(cached)
                fresh.append(request)
            else:
                del cached.tokens[kept:]
            cached.request, request.cache, cached.used = request, cached, self.clock
            ready.append(request)
        if self.share_prefixes and fresh:
            self._find_prefixes(fresh)
        self.waiting = blocked
        # Requests with a slot go first, so that one that finds no room has another one to wait for.
        ready.sort(key=lambda request: request.cache is None or request.cache.slot < 0)
        new = [request for request in ready if request.cache is not None and request.cache.slot < 0]
        self.copying = self._can_copy(new)
        room = not new or self._reserve(len(new), max(map(self._needed, new)), joining=new)
        for number, request in enumerate(ready):
            assert request.cache is not None
            rest = ready[number:]
            if request.cache.slot < 0 and not (room or self._reserve(1, self._needed(request), joining=rest)):
                rest = rest if self.active else rest[1:]
                for later in rest:
                    self._put_back(later)
                self.waiting = rest + self.waiting
                if not self.active and not self._admit_alone(request):
                    ended.append(request)
                break
            if request.cache.slot < 0:
                self._take_slot(request)
            self.active.append(request)
        return ended

    def _admit_alone(self, request: SamplingRequest) -> bool:
        """Admit a request when no other one is active, evicting unused prefixes."""
        if not self._reserve(1, self._needed(request), joining=[request]):
            request.error = self._too_small(request)
            self._finish(request)
            return False
        self._take_slot(request)
        self.active.append(request)
        return True

    def _put_back(self, request: SamplingRequest) -> None:
        """Undo admission. A cache with a slot is kept for the next try; a prefix that was only joined may be
        evicted."""
        if request.cache is not None:
            request.cache.request = None
            if request.session is None or request.cache.slot < 0:
                self._release(request.cache)
        request.cache = None

    def _find_prefixes(self, fresh: Sequence[SamplingRequest]) -> None:
        """Give each request without a cache its longest known prefix, and compute new ones that requests
        share."""
        for request in fresh:
            self._join(request, self.prefixes)
        short: list[Prefix] = []
        while True:
            # Caches without a prefix take part, too: theirs need not be computed again.
            alone = [
                cached
                for cached in self.sessions.values()
                if cached.slot >= 0 and cached.prefix is None and cached.own_length > self.shortest_prefix
            ]
            entries = [(request.sequence[:-1], self._prefix_length(request)) for request in fresh]
            entries += [(cached.tokens, -1) for cached in alone]
            tokens = best_shared_prefix(entries, self.shortest_prefix)
            if tokens is None or not self._reserve(0, 0, len(tokens), joining=fresh):
                break
            # Making room may have evicted some of them.
            holders = [
                cached for cached in alone if cached.slot >= 0 and cached.tokens[: len(tokens)] == tokens
            ]
            prefix = self.slab.to_prefix(holders[0].slot, tokens) if holders else Prefix(tokens, {}, {}, {})
            if not holders and self._is_short(prefix):
                short.append(prefix)
            elif not holders:
                self._compute_prefixes([prefix])
            prefix.used = self.clock
            self.prefixes.append(prefix)
            for cached in () if self._is_short(prefix) else holders:
                self.slab.shift(cached.slot, len(tokens), len(cached.tokens))
                cached.prefix = prefix
            for request in fresh:
                self._join(request, [prefix])
        self._compute_prefixes(short)

    def _is_short(self, prefix: Prefix) -> bool:
        """Whether a prefix is copied into slots, if there is room."""
        return len(prefix.tokens) < SHORT_PREFIX

    def _can_copy(self, new: Sequence[SamplingRequest]) -> bool:
        """Whether there is room for new slots with copies of their short prefixes."""
        self.copying = True
        lengths = [self._needed(request) for request in new]
        holding = self._holding()
        lengths += [cached.own_length for cached in holding]
        return self._fits(len(new) + len(holding), max(lengths, default=0), 0)

    def _is_copied(self, prefix: Prefix) -> bool:
        return self.copying and self._is_short(prefix)

    def _prefix_length(self, request: SamplingRequest) -> int:
        return len(request.cache.tokens) if request.cache else 0

    def _join(self, request: SamplingRequest, prefixes: Sequence[Prefix]) -> None:
        cached = request.cache
        assert cached is not None
        for prefix in prefixes:
            length = len(prefix.tokens)
            if (
                len(cached.tokens) < length < len(request.sequence)
                and request.sequence[:length] == prefix.tokens
            ):
                cached.prefix, cached.tokens = prefix, list(prefix.tokens)
                prefix.used = self.clock

    def _compute_prefixes(self, prefixes: Sequence[Prefix]) -> None:
        """Compute keys and values, at most `prefill_chunk` tokens at once."""
        longest = max((len(prefix.tokens) for prefix in prefixes), default=0)
        slab = Slab(self.adapted.shapes, len(prefixes), longest, self.device, self.slab.kernels)
        pieces: list[Piece] = []
        tokens: list[int] = []
        positions: list[int] = []
        for slot, prefix in enumerate(prefixes):
            start = 0
            while start < len(prefix.tokens):
                chunk = prefix.tokens[start : start + self.prefill_chunk - len(tokens)]
                pieces.append(Piece(slot, start, len(chunk), None))
                tokens += chunk
                positions += range(start, start + len(chunk))
                start += len(chunk)
                ended = slot + 1 == len(prefixes) and start == len(prefix.tokens)
                if ended or len(tokens) == self.prefill_chunk:
                    self._compute(slab, pieces, tokens, positions)
                    pieces, tokens, positions = [], [], []
        for slot, prefix in enumerate(prefixes):
            made = slab.to_prefix(slot, prefix.tokens)
            prefix.keys, prefix.values, prefix.inputs = made.keys, made.values, made.inputs

    # -- memory ----------------------------------------------------------------------------------------

    def _holding(self) -> list[Cached]:
        """Every cache with a slot: those of sessions, and of active requests without a session."""
        caches = {id(cached): cached for cached in self.sessions.values()}
        caches |= {id(request.cache): request.cache for request in self.active if request.cache}
        return [cached for cached in caches.values() if cached.slot >= 0]

    def _fits(self, slots: int, capacity: int, more: int) -> bool:
        pad = self.slab.layout.pad
        shared = sum(pad(len(prefix.tokens)) for prefix in self.prefixes) + pad(more)
        return (slots * pad(capacity) + shared) * self.token_bytes <= self.cache_bytes

    def _reserve(
        self, more_slots: int, capacity: int, more_tokens: int = 0, joining: Sequence[SamplingRequest] = ()
    ) -> bool:
        """Make room for more slots, all of a capacity, and for a prefix of `more_tokens`. Evicts what is not
        in use, least recently used first; returns False when that is not enough. `joining` are requests that
        have a prefix but no slot yet."""
        while True:
            holding = self._holding()
            slots = len(holding) + more_slots
            needed = max(capacity, *(cached.own_length for cached in holding), 0)
            if self._fits(slots, needed, more_tokens):
                break
            idle = [cached for cached in holding if cached.request is None]
            in_use = {id(cached.prefix) for cached in holding}
            in_use |= {id(request.cache.prefix) for request in joining if request.cache}
            unused = [prefix for prefix in self.prefixes if id(prefix) not in in_use]
            if idle:
                self._release(min(idle, key=lambda cached: cached.used))
            elif unused:
                self.prefixes.remove(min(unused, key=lambda prefix: prefix.used))
            else:
                return False
        slab = self.slab
        if (
            slab.slots < slots
            or slab.capacity < needed
            or not self._fits(slab.slots, slab.capacity, more_tokens)
        ):
            self._resize(slots, needed, more_tokens)
        return True

    def _resize(self, slots: int, capacity: int, more_tokens: int) -> None:
        """Grow geometrically if the budget allows, otherwise to what is needed; slots become consecutive."""
        holding = sorted(self._holding(), key=lambda cached: cached.slot)
        slab = self.slab
        spare_slots = max(slots, 2 * slab.slots, 8) if slots > slab.slots else max(slots, slab.slots)
        spare_capacity = max(capacity, 2 * slab.capacity, 64) if capacity > slab.capacity else slab.capacity
        for wanted in ((spare_slots, spare_capacity), (slots, spare_capacity), (slots, capacity)):
            if self._fits(*wanted, more_tokens):
                slots, capacity = wanted
                break
        slab.resize(slots, capacity, [cached.slot for cached in holding])
        for slot, cached in enumerate(holding):
            cached.slot = slot
        self.free = list(range(len(holding), slots))

    def _needed(self, request: SamplingRequest) -> int:
        """Places that a request needs in a slot."""
        prefix = request.cache.prefix if request.cache is not None else None
        shared = 0 if prefix is None or self._is_copied(prefix) else len(prefix.tokens)
        return len(request.sequence) - shared

    def _take_slot(self, request: SamplingRequest) -> None:
        cached = request.cache
        assert cached is not None
        cached.slot = heapq.heappop(self.free)
        if cached.prefix is not None and self._is_copied(cached.prefix):
            self.slab.take_in(cached.slot, cached.prefix)
            cached.prefix = None
        else:
            self.slab.begin(cached.slot, cached.prefix)

    def _release(self, cached: Cached) -> None:
        if cached.slot >= 0:
            heapq.heappush(self.free, cached.slot)
        cached.slot, cached.prefix, cached.tokens = -1, None, []

    def _too_small(self, request: SamplingRequest) -> EngineError:
        needed = self.slab.layout.pad(len(request.sequence)) * self.token_bytes
        return EngineError(
            f"a sequence of {len(request.sequence)} tokens needs {needed} bytes of cache, the budget is "
            f"{self.cache_bytes}: raise cache_bytes or shorten the conversation"
        )

    # -- steps -----------------------------------------------------------------------------------------

    def _compose(self, ended: list[SamplingRequest]) -> list[tuple[SamplingRequest, int]]:
        """Choose how many pending tokens of each active request go into this step."""
        while True:
            pieces: list[tuple[SamplingRequest, int]] = []
            room = self.prefill_chunk
            longest = 0
            for request in self.active:
                assert request.cache is not None
                count = len(request.sequence) - len(request.cache.tokens)
                if count > 1:
                    if room <= 0:
                        continue
                    count = min(count, room)
                room -= count
                pieces.append((request, count))
                longest = max(longest, request.cache.own_length + count)
            if longest <= self.slab.capacity:
                return pieces
            if self._reserve(0, longest):
                return pieces
            # The youngest request gives up its slot and starts again when there is room.
            youngest = self.active.pop()
            assert youngest.cache is not None
            self._release(youngest.cache)
            if self.active:
                self._put_back(youngest)
                self.waiting.insert(0, youngest)
            else:
                youngest.error = self._too_small(youngest)
                self._finish(youngest)
                ended.append(youngest)
                return []

    def _compute(
        self,
        slab: Slab,
        pieces: Sequence[Piece],
        tokens: Sequence[int],
        positions: Sequence[int],
        ends: Sequence[int] = (),
    ) -> torch.Tensor:
        """Hidden states of the tokens at `ends`."""
        self.computed_tokens += len(tokens)
        self._try_decoder()
        chosen = [] if len(ends) == len(tokens) else [torch.tensor(ends, dtype=torch.long)]
        plan = StepPlan(slab, pieces, [torch.tensor(tokens), torch.tensor(positions), *chosen])
        with self.adapted.using(plan):
            hidden = self.adapted.hidden(plan.sent[0], plan.sent[1])
        return hidden[plan.sent[2]] if chosen else hidden

    def _try_decoder(self) -> None:
        """Test the fused model's decoder once, on fixed tokens, so that a resumed run decides the same."""
        fast, kernels = self.adapted.fast, self.slab.kernels
        fused = None if fast is None else fast.fused
        if fused is None or kernels is None or fused.is_decoded is not None:
            return
        slab = Slab(self.adapted.shapes, 2, 8, self.device, kernels)
        plan = StepPlan(slab, [Piece(0, 0, 5, None), Piece(1, 0, 1, None)])
        assert plan.decode_batch is not None
        tokens = torch.arange(6) % self.adapted.vocabulary
        fused.try_decoder(tokens, torch.tensor([*range(5), 0]), plan, plan.decode_batch)

    def _advance(self, pieces: Sequence[tuple[SamplingRequest, int]]) -> list[SamplingRequest]:
        tokens: list[int] = []
        positions: list[int] = []
        laid: list[Piece] = []
        drawing: list[SamplingRequest] = []
        ends: list[int] = []
        for request, count in pieces:
            cached = request.cache
            assert cached is not None
            start = len(cached.tokens)
            laid.append(Piece(cached.slot, cached.own_length, count, cached.prefix))
            chunk = request.sequence[start : start + count]
            tokens += chunk
            positions += range(start, start + count)
            cached.tokens += chunk
            cached.used = self.clock
            if cached.prefix is not None:
                cached.prefix.used = self.clock
            if start + count == len(request.sequence):
                drawing.append(request)
                ends.append(len(tokens) - 1)
        hidden = self._compute(self.slab, laid, tokens, positions, ends)
        return self._draw(hidden, drawing) if drawing else []

    def _draw(self, hidden: torch.Tensor, drawing: Sequence[SamplingRequest]) -> list[SamplingRequest]:
        noise = uniform_noise(
            torch.tensor([request.seed for request in drawing]),
            torch.tensor([len(request.sequence) for request in drawing]),
        )
        drawn, logprobs = draw_tokens(
            self.adapted.logits(hidden),
            torch.tensor([request.params.temperature for request in drawing]),
            torch.tensor([request.params.top_p for request in drawing]),
            noise,
        )
        # One copy to the host: float64 holds every token id and every float32 exactly.
        found = torch.stack([drawn.double(), logprobs.double()]).tolist()
        if not all(map(isfinite, found[1])):
            raise EngineError("the model gives logits that are not finite: its weights have diverged")
        ended: list[SamplingRequest] = []
        for request, token, logprob in zip(drawing, map(int, found[0]), found[1], strict=True):
            request.sequence.append(token)
            request.logprobs.append(logprob)
            reason: StopReason | None = None
            if token in request.stop_tokens:
                reason = "stop"
            elif len(request.logprobs) >= request.params.max_tokens:
                reason = "length"
            if reason is not None:
                sampled = request.sequence[request.prompt_length :]
                request.completion = Completion(sampled, request.logprobs, reason, self.weight_version)
                self._finish(request)
                ended.append(request)
        return ended

    def _finish(self, request: SamplingRequest) -> None:
        cached, request.cache = request.cache, None
        if request in self.active:
            self.active.remove(request)
        if cached is None:
            return
        cached.request = None
        # A session that ended while its request was running is no longer in `sessions`.
        known = request.session is not None and self.sessions.get(request.session) is cached
        if not (known and self.keep_sessions):
            self._release(cached)
