"""The model that lm-eval calls: requests are text, `TokenPolicy` and `Scorer` answer them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from tqdm import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from efla_lm.evaluation.scoring import Pair, Scorer
from efla_lm.evaluation.tokens import TokenPolicy

DEFAULT_NEW_TOKENS = 256  # lm-eval's own default


class HarnessLM(TemplateLM):
    """lm-eval model over any Hugging Face causal model.

    Every process gets all requests from lm-eval and returns all answers. `Scorer` shares the batches among processes:
    lm-eval's own split by documents stays off (`rank` 0 of 1 on every process).
    """

    backend = "causal"

    def __init__(self, scorer: Scorer, policy: TokenPolicy) -> None:
        super().__init__()
        self.scorer = scorer
        self.policy = policy
        self.tokenizer = policy.tokenizer
        self._device = scorer.device

    @property
    def eot_token_id(self) -> int:
        return self.policy.prefix_id if self.policy.eos_id is None else self.policy.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.policy.prefix_id

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        return (self.policy.plain if add_special_tokens is False else self.policy.contexts)([string])[0]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self.scorer.score(self.policy.pairs([request.args for request in requests]))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]]
    ) -> list[tuple[float, bool]]:
        return self.scorer.score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        pairs: list[Pair] = self.policy.rolling([request.args[0] for request in requests])
        return [total for total, _ in self.scorer.score(pairs)]

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first stop string, batches of one set of options, longest prompt first."""
        prompts = self.policy.contexts([request.args[0] for request in requests])
        options = [_Options(request.args[1], self.tokenizer, self.eot_token_id) for request in requests]
        batches = list(self._generation_batches(prompts, options))
        # a sharded model generates on all processes together
        mine = batches if self.scorer.lockstep else batches[self.scorer.rank :: self.scorer.world_size]
        done: list[tuple[int, str]] = []
        for numbers in tqdm(mine, desc="generating", disable=None if self.scorer.rank == 0 else True, leave=False):
            texts = self.scorer.in_parts(
                numbers,
                lambda part: self._generate([prompts[n] for n in part], options[part[0]]),
                lambda n: min(len(prompts[n]), self.max_length) + options[n].new_tokens,
            )
            done.extend(zip(numbers, texts))
        answers = dict(item for part in self.scorer.gather(done) for item in part)
        return [answers[n] for n in range(len(requests))]

    def _generation_batches(self, prompts: list[list[int]], options: list[_Options]) -> Iterator[list[int]]:
        order = sorted(range(len(prompts)), key=lambda n: (options[n].key, -len(prompts[n]), n))
        start = 0
        while start < len(order):
            first = order[start]
            length = min(len(prompts[first]), self.max_length) + options[first].new_tokens
            size = self.scorer.batch_size
            rows = size if isinstance(size, int) else max(1, self.scorer.batch_tokens // length)
            batch = [n for n in order[start : start + rows] if options[n].key == options[first].key]
            yield batch
            start += len(batch)

    def _generate(self, prompts: list[list[int]], options: _Options) -> list[str]:
        room = max(1, self.max_length - options.new_tokens)
        kept = [prompt[-room:] or [self.prefix_token_id] for prompt in prompts]
        longest = max(map(len, kept))
        ids = torch.full((len(kept), longest), self.eot_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(kept):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        out = self.scorer.model.generate(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=options.new_tokens,
            pad_token_id=self.eot_token_id,
            stopping_criteria=StoppingCriteriaList([_StopStrings(self.tokenizer, options.until, longest)]),
            **options.sampling,
        )
        texts = self.tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
        return [_cut_at(text, options.until) for text in texts]


class _Options:
    """Generation options of one request, normalised from lm-eval's names."""

    def __init__(self, given: dict[str, Any], tokenizer: Any, eot_token_id: int) -> None:
        rest = dict(given)
        until = rest.pop("until", None) or []
        self.until = [*([until] if isinstance(until, str) else until), tokenizer.decode([eot_token_id])]
        sizes = [rest.pop(k, None) for k in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")]
        self.new_tokens = next((int(size) for size in sizes if size is not None), DEFAULT_NEW_TOKENS)
        temperature = float(rest.pop("temperature", 0.0))
        sample = bool(rest.pop("do_sample", temperature > 0.0)) and temperature > 0.0
        self.sampling: dict[str, Any] = {"do_sample": sample, **rest}
        if sample:
            self.sampling["temperature"] = temperature
        self.key = repr((self.until, self.new_tokens, sorted(self.sampling.items())))


class _StopStrings(StoppingCriteria):
    """A row is done once the text of its last tokens holds a stop string."""

    def __init__(self, tokenizer: Any, until: list[str], prompt_length: int) -> None:
        self.tokenizer = tokenizer
        self.until = [stop for stop in until if stop]
        self.prompt_length = prompt_length
        self.tail = max(map(len, self.until), default=0) + 1  # a token holds a character or more, but for byte tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> Any:
        tails = self.tokenizer.batch_decode(input_ids[:, self.prompt_length :][:, -self.tail :])
        done = [any(stop in tail for stop in self.until) for tail in tails]
        return torch.tensor(done, device=input_ids.device)


def _cut_at(text: str, until: list[str]) -> str:
    for stop in until:
        if stop:
            text = text.split(stop)[0]
    return text
