"""What the endpoint does with a parsed request: checks, tokens, a slot, the generation.

Knows neither HTTP nor Ray; `endpoint` puts HTTP around it, `gateway` puts it into Serve.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from overstory.orchestrator import openai_errors
from overstory.orchestrator.admission import Admission, QueueFull, Slot
from overstory.orchestrator.answer_parsers import AnswerParser, ChatPlan, ParserSettings
from overstory.orchestrator.backend import Backend, EngineRefused, ReplicaLost
from overstory.orchestrator.generation import ChoicePlan, Generation, LogprobsAsked, Piece
from overstory.orchestrator.generation_config import SamplingDefault
from overstory.orchestrator.journal import Journal
from overstory.orchestrator.openai_errors import ApiError
from overstory.orchestrator.openai_protocol import (
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
    Constraint,
    GenerationRequest,
)
from overstory.orchestrator.openai_responses import Usage
from overstory.orchestrator.readiness import Readiness
from overstory.orchestrator.resume import PROOF, ResumeLimits
from overstory.orchestrator.sampling import Sampling, choice_seeds, draw_seed, fold_seed
from overstory.orchestrator.tokenizer import ChatTemplateError, Tokenizer

logger = logging.getLogger(__name__)

_HOLD_WHOLE_S = 0.1  # a stop string in an unstreamed answer is seen this much later
_HOLD_STREAM_S = (0.005, 0.05)  # the least is below a step of a large model, which goes out whole
_MESSAGES_PER_S = 1500.0
"""Of all streams together, about: a third of what one Serve ingress was seen to carry."""
_DESCRIBED = 1 << 16  # tokens; with 20 alternatives, what they stand for cost more than all else
_LONG_TEXT_CHARS = 20_000  # above this, tokenizing would hold up the event loop for milliseconds


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What a request may want.

    Attributes:
        context_tokens: prompt and completion together.
        prompt_tokens: prompt alone; engines keep a few positions back.
        request_timeout_s: waiting included.
    """

    context_tokens: int
    prompt_tokens: int
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """A request, checked and in tokens. `prefixes` is text to put before each choice (`echo`),
    `logprobs` the number of alternatives to log, None for no log-probabilities. `special_tokens`
    keeps the model's special tokens in the text, `parser` makes the parser of a choice's text."""

    plans: tuple[ChoicePlan, ...]
    stops: tuple[str, ...]
    prefixes: tuple[str, ...]
    logprobs: int | None
    special_tokens: bool = False
    parser: Callable[[], AnswerParser] | None = None


def stream_hold_s(sequences: int) -> float:
    """How long tokens of a stream are held together while so many sequences run."""
    least, most = _HOLD_STREAM_S
    return min(most, max(least, sequences / _MESSAGES_PER_S))


class RunningRequest:
    """A request that holds its slot. Iterate `pieces` once, then `aclose`, whatever happened."""

    def __init__(self, generation: Generation, slot: Slot, service: "EndpointService") -> None:
        self._generation = generation
        self._slot = slot
        self._service = service

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._generation.usage

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it comes.

        Raises:
            ApiError: whatever went wrong, in the client's terms.
        """
        try:
            async for piece in self._generation.pieces():
                yield piece
        except Exception as error:
            raise self._service.api_error(error) from error

    async def aclose(self) -> None:
        """Abort what still runs and give the slot back."""
        try:
            await self._generation.aclose()
        finally:
            self._slot.release()


class EndpointService:
    """Everything behind the routes. Belongs to one event loop."""

    def __init__(
        self,
        served_name: str,
        tokenizer: Tokenizer,
        backend: Backend,
        admission: Admission,
        readiness: Readiness,
        limits: ServiceLimits,
        resume: ResumeLimits | None = None,
        parsers: ParserSettings | None = None,
        on_move: Callable[[str], None] | None = None,
        chat_defaults: Mapping[SamplingDefault, float] | None = None,
    ) -> None:
        """`resume` says how far a sequence is carried on after the loss of its replica, `on_move`
        is as for `Carrier`; `parsers` find tool calls and reasoning in chats; `chat_defaults` is
        how chats are sampled that do not say."""
        self.served_name = served_name
        self.readiness = readiness
        self.limits = limits
        self.journal = Journal()
        self.admission = admission
        self.tokenizer = tokenizer
        self._describe = lru_cache(_DESCRIBED)(tokenizer.token)
        self._backend = backend
        self._resume = resume or ResumeLimits()
        self._on_move = on_move
        self._parsers = parsers or ParserSettings()
        self._chat_defaults = chat_defaults or {}

    async def plan_completion(self, request: CompletionRequest) -> Job:
        """Check and tokenize `POST /v1/completions`."""
        prompts = request.prompts
        self._check_servable(request, len(prompts))
        ids = [await self._prompt_ids(prompt) for prompt in prompts]
        prefixes: list[str] = []
        if request.echo:
            texts = [
                prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
                for prompt in prompts
            ]
            prefixes = [text for text in texts for _ in range(request.n)]
        plan = ChatPlan(constraint=request.constraint)
        return self._job(request, ids, request.max_tokens, "prompt", tuple(prefixes), plan)

    async def plan_chat(self, request: ChatCompletionRequest) -> Job:
        """Check, render and tokenize `POST /v1/chat/completions`."""
        self._check_servable(request, 1)
        plan = await self._plan(request)
        ids = await self._chat_ids(request, plan)
        defaults = {
            name: value
            for name, value in self._chat_defaults.items()
            if name not in request.model_fields_set
        }
        return self._job(request, [ids], request.limit, "messages", (), plan, defaults)

    async def chat_ids(self, request: ChatCompletionRequest) -> tuple[int, ...]:
        """The prompt of a conversation, in tokens."""
        return await self._chat_ids(request, await self._plan(request))

    async def _chat_ids(self, request: ChatCompletionRequest, plan: ChatPlan) -> tuple[int, ...]:
        messages = [message.for_template() for message in request.messages]
        tools = {} if plan.tools is None else {"tools": plan.tools}
        try:
            text = self.tokenizer.render_chat(messages, **{**plan.variables, **tools})
        except ChatTemplateError as error:
            raise openai_errors.invalid(str(error), "messages") from error
        return await self._encode(text, special=False, param="messages")

    async def _plan(self, request: ChatCompletionRequest) -> ChatPlan:
        if request.uses_tools:  # a schema may be large, and the first one imports SGLang's parsers
            return await asyncio.to_thread(self._parsers.plan, request)
        return self._parsers.plan(request)

    async def open(self, job: Job, request_id: str, stream: bool) -> RunningRequest:
        """A slot and a generation that has not begun. Unless it is to `stream`, nobody sees its
        pieces before the end, and its tokens may come in fewer messages.

        Raises: ApiError: 429 when the queue is full, 503 when nothing can generate, 504 when the
            wait was too long.
        """
        deadline_s = asyncio.get_running_loop().time() + self.limits.request_timeout_s
        try:
            async with asyncio.timeout_at(deadline_s):
                slot = await self.admission.acquire(len(job.plans))
        except (QueueFull, TimeoutError) as error:
            raise self.api_error(error) from error
        generation = Generation(
            request_id,
            job.plans,
            job.stops,
            backend=self._backend,
            decode=partial(self.tokenizer.decode, special=job.special_tokens),
            journal=self.journal,
            deadline_s=deadline_s,
            hold_s=stream_hold_s(self.admission.running) if stream else _HOLD_WHOLE_S,
            on_commit=self.readiness.generated,
            on_loss=self._lost,
            on_move=self._on_move,
            on_end=slot.release,  # A client that reads slowly keeps no place.
            resume=self._resume,
            logprobs=None if job.logprobs is None else LogprobsAsked(job.logprobs, self._describe),
        )
        return RunningRequest(generation, slot, self)

    async def prove(self) -> None:
        """Generate a token through the same path as a request, beside the queue."""
        plan = ChoicePlan(0, self._proof_ids(), Sampling(seed=0, max_new_tokens=2, temperature=0.0))
        loop = asyncio.get_running_loop()
        generation = Generation(
            f"proof-{draw_seed():x}",
            [plan],
            (),
            backend=self._backend,
            decode=self.tokenizer.decode,
            journal=self.journal,
            deadline_s=loop.time() + self.limits.request_timeout_s,
            resume=PROOF,
        )
        try:
            async for _ in generation.pieces():
                pass
        finally:
            await generation.aclose()

    def api_error(self, error: BaseException) -> ApiError:
        """What a failure is to a client."""
        match error:
            case ApiError():
                return error
            case QueueFull():
                return openai_errors.queue_full(str(error), error.retry_after_s)
            case TimeoutError():
                return openai_errors.timed_out(self.limits.request_timeout_s)
            case ReplicaLost():
                cause = str(error).split("\n", 1)[0]
                return openai_errors.unavailable(
                    f"The replica that served this request was lost: {cause}", "replica_lost"
                )
            case EngineRefused():
                return openai_errors.from_engine(
                    str(error), error.status, self.admission.retry_after_s()
                )
            case _:
                logger.error("a request failed", exc_info=error)
                return openai_errors.internal(f"{type(error).__name__}: {error}")

    def _lost(self, cause: str) -> None:
        """A replica was lost under a request, which goes on elsewhere or fails."""
        logger.error("replica lost: %s", cause)
        self.readiness.doubt(cause.split("\n", 1)[0])

    def _check_servable(self, request: GenerationRequest, prompts: int) -> None:
        if request.model != self.served_name:
            raise openai_errors.model_not_found(request.model, self.served_name)
        self._check_choices(prompts, request.n)
        if not self.readiness.ready:
            raise openai_errors.unavailable(
                f"No replica is ready: {self.readiness.reason}", "not_ready"
            )
        try:
            self.admission.refuse_if_full(prompts * request.n)
        except QueueFull as error:
            raise self.api_error(error) from error

    def _check_choices(self, prompts: int, n: int) -> None:
        """No more than one replica takes: it may be the only one that is left."""
        if prompts * n > MAX_CHOICES:
            raise openai_errors.invalid(
                f"{prompts} prompts with n={n} make more than {MAX_CHOICES} choices", "n"
            )
        if prompts * n > self.admission.largest:
            raise openai_errors.invalid(
                f"{prompts} prompts with n={n} make {prompts * n} choices; one request may have at "
                f"most {self.admission.largest} here (gateway.max_concurrent_requests). Send "
                "several smaller requests.",
                "n" if n > 1 else "prompt",
                "too_many_choices",
            )

    async def _prompt_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self._encode(prompt, special=True, param="prompt")
        worst = max(prompt)
        if worst >= self.tokenizer.vocab_size:
            raise openai_errors.invalid(
                f"prompt: token id {worst} is not below the vocabulary's "
                f"{self.tokenizer.vocab_size}",
                "prompt",
            )
        return tuple(prompt)

    async def _encode(self, text: str, special: bool, param: str) -> tuple[int, ...]:
        least = len(text) // self.tokenizer.max_token_chars
        if least > self.limits.prompt_tokens:  # refused without the work of tokenizing it
            raise openai_errors.prompt_too_long(
                least, self.limits.prompt_tokens, self.limits.context_tokens, param
            )
        if len(text) > _LONG_TEXT_CHARS:
            ids = await asyncio.to_thread(self.tokenizer.encode, text, special)
        else:
            ids = self.tokenizer.encode(text, special)
        if not ids:
            raise openai_errors.invalid(f"{param}: has no tokens", param)
        return tuple(ids)

    def _job(
        self,
        request: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        max_new: int | None,
        param: str,
        prefixes: tuple[str, ...],
        plan: ChatPlan,
        defaults: Mapping[SamplingDefault, float] | None = None,
    ) -> Job:
        self._check_token_ids(request)
        plans: list[ChoicePlan] = []
        for number, ids in enumerate(prompts):
            new = self._new_tokens(len(ids), max_new, param)
            if request.min_tokens > new:
                raise openai_errors.invalid(
                    f"min_tokens is {request.min_tokens}; at most {new} tokens may be generated",
                    "min_tokens",
                )
            seed = draw_seed() if request.seed is None else fold_seed(request.seed)
            for choice_seed in choice_seeds(seed, request.n):
                sampling = _sampling(request, choice_seed, new, plan.constraint, defaults or {})
                plans.append(ChoicePlan(number, ids, sampling, request.session))
        return Job(
            tuple(plans),
            (*request.stops, *plan.stops),
            prefixes,
            request.alternatives,
            plan.special_tokens or not request.skip_special_tokens,
            plan.parser,
        )

    def _new_tokens(self, prompt: int, wanted: int | None, param: str) -> int:
        context = self.limits.context_tokens
        if prompt > self.limits.prompt_tokens or prompt >= context:
            longest = min(self.limits.prompt_tokens, context - 1)
            raise openai_errors.prompt_too_long(prompt, longest, context, param)
        if wanted is not None and prompt + wanted > context:
            raise openai_errors.context_exceeded(prompt, wanted, context, param)
        return context - prompt if wanted is None else wanted

    def _check_token_ids(self, request: GenerationRequest) -> None:
        for param, ids in (
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", [int(token) for token in request.logit_bias]),
        ):
            worst = max(ids, default=0)
            if worst >= self.tokenizer.vocab_size:
                raise openai_errors.invalid(
                    f"{param}: {worst} is not below the vocabulary's {self.tokenizer.vocab_size}",
                    param,
                )

    def _proof_ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode("1", True)) or (0,)


def _sampling(
    request: GenerationRequest,
    seed: int,
    max_new_tokens: int,
    constraint: Constraint | None,
    defaults: Mapping[SamplingDefault, float],
) -> Sampling:
    return Sampling(
        seed=seed,
        max_new_tokens=max_new_tokens,
        temperature=defaults.get("temperature", request.temperature),
        top_p=defaults.get("top_p", request.top_p),
        top_k=int(defaults.get("top_k", request.top_k)) or -1,
        min_p=defaults.get("min_p", request.min_p),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logit_bias=tuple((int(token), bias) for token, bias in request.logit_bias.items()),
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=defaults.get("repetition_penalty", request.repetition_penalty),
        min_new_tokens=request.min_tokens,
        speculate=request.speculate,
        constraint=constraint,
    )
