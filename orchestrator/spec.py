"""What a user deploys: the typed form of `deployment.yaml`.

Everything that can be judged from the file alone is refused here; what needs the model's files or
the nodes is judged by `plan`. Light on purpose: neither Ray nor torch nor SGLang is imported.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from overstory.orchestrator.affinity import Routing
from overstory.orchestrator.engine_args import check_engine_args
from overstory.orchestrator.parser_names import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    check_parser,
)
from overstory.orchestrator.spec_environment import check_environment
from overstory.orchestrator.spec_errors import SpecError, from_validation_error
from overstory.orchestrator.spec_yaml import read_yaml

MAX_TREE_NODES = 63
"""Most nodes a tree may have: with its root, 64 rows of one verify forward."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TreeSpec(_Section):
    """How far to draft ahead."""

    budget: int = Field(default=31, ge=0, le=MAX_TREE_NODES)
    """Draft nodes per request and step: 0 decodes plainly, the drafter's block size - 1 drafts a
    chain, any other number a best-first tree of that many nodes. It is also the most that a tree
    policy set later may use, beside the chain, for which there is always room."""

    policy: Literal["fixed", "auto"] = "fixed"
    """`fixed`: every step drafts `budget` nodes. `auto`: each step takes plain, the chain or a tree
    of at most `budget` nodes, whichever gives most tokens per millisecond by a cost table that is
    measured when a replica starts."""

    measure_s: float = Field(default=20.0, gt=0, le=600)
    """Seconds that measuring the cost table may take at a replica's first start on a machine; later
    ones find it in `~/.cache/overstory`. Only with `policy: auto`."""

    acceptance_floor: float = Field(default=0.05, ge=0, lt=1)
    """With `policy: auto`, a drafter of whose best first guesses a smaller share is accepted is
    switched off with a warning and tried again later; 0 never does."""

    spine_first: bool = False
    """Keep the drafter's single most likely chain whole and spend the rest of the budget on
    branches, instead of taking nodes purely by path probability."""


class ResourceSpec(_Section):
    """What each rank of a replica gets."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where ranks compute."""

    cpus_per_rank: float = Field(default=1.0, gt=0, le=1024)
    """Ray CPUs that a rank reserves; on `cpu` also its number of compute threads (rounded down, at
    least one)."""

    gpus_per_rank: float | None = Field(default=None, gt=0, le=1)
    """Ray GPUs that a rank reserves, a whole one or a fraction. Unset: 1 on `cuda`, 0 on `cpu`."""

    @model_validator(mode="after")
    def _no_gpu_share_on_cpu(self) -> "ResourceSpec":
        if self.device == "cpu" and self.gpus_per_rank is not None:
            raise ValueError(
                "gpus_per_rank is set but device is cpu; set device: cuda or remove gpus_per_rank"
            )
        return self

    @property
    def gpus(self) -> float:
        """GPUs per rank with the default filled in."""
        if self.device == "cpu":
            return 0.0
        return 1.0 if self.gpus_per_rank is None else self.gpus_per_rank

    @property
    def threads(self) -> int:
        """Compute threads of a rank."""
        return max(1, int(self.cpus_per_rank))


class GatewaySpec(_Section):
    """The HTTP endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for all interfaces."""

    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port of the endpoint."""

    token_port: int = Field(default=0, ge=0, le=65535)
    """TCP port on the head node at which replicas deliver tokens to the gateway; 0: any that is
    free. Set one where a firewall between the nodes has to let it through."""

    max_concurrent_requests: int = Field(default=64, ge=1)
    """Sequences in the engine at a time, per replica; the rest wait. A request counts with all its
    sequences (prompts times `n`, so 1 for most) and starts when there is room for all; one with
    more than this is answered 400."""

    max_queued_requests: int = Field(default=64, ge=0)
    """Requests that may wait; one more is answered 429 with Retry-After."""

    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Largest request body; a larger one is answered 413."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest a request may take, waiting included, in seconds; then it is aborted (504)."""

    max_resumes: int = Field(default=3, ge=0)
    """Replicas that may be lost under a sequence: each time another one goes on with it; one more
    ends it with an error. What a restart or a smaller number of replicas moves does not count."""

    resume_wait_s: float = Field(default=300.0, ge=0)
    """Longest a sequence that has lost its replica waits for another to go on, in seconds."""

    routing: Routing = "least_loaded"
    """Which replica gets a sequence: `least_loaded` (of two at random the shorter queue),
    `prefix_affine` (the one that was sent the longest beginning of the prompt, within a bound on
    load), `session_sticky` (the one that the request's `prompt_cache_key` or `user` went to, within
    that bound; others as prefix_affine)."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt; a longer one is answered 400. Unset: what the engine takes."""

    sampling_defaults: Literal["model", "openai"] = "model"
    """What chats get that do not set temperature, top_p, top_k, min_p or repetition_penalty: what
    the model's `generation_config.json` says (`model`), or OpenAI's defaults. As SGLang's argument
    of this name."""

    api_keys_file: str | None = None
    """File of API keys, hashed, on the node where the gateway runs (`overstory key new`). It is
    read anew when it changes. A path starting with `.` is relative to the deployment file."""

    api_keys_env: str | None = Field(default=None, min_length=1)
    """Environment variable of the gateway's process that holds API keys, with commas between;
    `admin:` before one makes it an admin's."""

    cors_origins: list[str] = []
    """Origins whose web pages may use the endpoint (`https://chat.example.org`, or `*`). Empty:
    none."""

    tls_cert_file: str | None = None
    """Certificate chain (PEM) on the node where the endpoint listens; with it the endpoint speaks
    HTTPS."""

    tls_key_file: str | None = None
    """Private key of that certificate (PEM)."""

    tool_call_parser: str | None = None
    """Parser of tool calls, by SGLang's name (`kimi_k2`, ...). Unset: tools only where
    `tool_choice` forces a call."""

    reasoning_parser: str | None = None
    """Parser of reasoning, by SGLang's name (`kimi_k2`, ...). Unset: reasoning is content."""

    @model_validator(mode="after")
    def _certificate_with_key(self) -> "GatewaySpec":
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together; set both or neither")
        return self

    @model_validator(mode="after")
    def _two_ports(self) -> "GatewaySpec":
        if self.port == self.token_port:
            raise ValueError(
                f"token_port is {self.token_port}, as port is; they are two ports, set another"
            )
        return self

    @property
    def ports(self) -> list[int]:
        """Those that are set."""
        return [port for port in (self.port, self.token_port) if port]

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self.tls_cert_file is None else "https"

    @property
    def url(self) -> str:
        """Where it listens, as set."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @field_validator("tool_call_parser")
    @classmethod
    def _known_tool_call_parser(cls, name: str | None) -> str | None:
        return check_parser(name, TOOL_CALL_PARSERS)

    @field_validator("reasoning_parser")
    @classmethod
    def _known_reasoning_parser(cls, name: str | None) -> str | None:
        return check_parser(name, REASONING_PARSERS)


class ControlSpec(_Section):
    """Step leases: how the controller steers the ranks."""

    lease_steps: int = Field(default=64, ge=1, le=1_000_000)
    """Steps that one lease permits; see `control.lease_s`."""

    lease_s: float = Field(default=0.5, ge=0)
    """A replica that runs those steps sooner than in so many seconds gets as many as it runs in
    them, at most sixteen times as many: each lease costs control calls."""

    lease_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds that rank 0 waits for a late lease; then ranks run free under the last policy."""

    defrag_every_s: float = Field(default=0.0, ge=0)
    """Seconds between two looks at how scattered the KV rows of requests are; 0 looks only when
    `overstory defrag` asks."""

    defrag_below: float = Field(default=0.9, ge=0, le=1)
    """Share of neighbouring rows that are neighbours in the pool, below which such a look is
    followed by relocation passes."""

    kv_hand_off: Literal["auto", "on", "off"] = "off"
    """Whether the KV of a sequence that moves to another replica (restart, fewer replicas) moves
    with it, instead of being computed again; `auto`: between GPUs. It takes GPU memory that the
    plan does not count (docs/hand-off.md)."""

    kv_hand_off_tokens: int = Field(default=1024, ge=1)
    """Shortest sequence whose KV moves; a shorter one is computed sooner than it is asked for."""

    compare_digests: Literal["report", "gather"] = "report"
    """Who compares what the ranks of a replica did: the controller by their reports, or also
    (`gather`) the ranks themselves whenever a lease begins."""

    weights_from_peer: Literal["auto", "on", "off"] = "off"
    """Whether a replica that starts beside others takes its weights from one of them instead of
    from disk; `auto`: between GPUs. It takes GPU memory that the plan does not count
    (docs/hand-off.md)."""

    unresponsive_s: float = Field(default=60.0, gt=0)
    """Seconds after which a rank whose control side does not answer is ended, and its replica with
    it: it may be stopped, cut off, or its host overloaded."""

    restart_budget: int = Field(default=3, ge=1)
    """Lives in a row that a replica may fail (at its start, or within `proven_s` of its first
    token) before it is given up and the deployment goes on with one replica fewer."""

    proven_s: float = Field(default=60.0, ge=0)
    """Seconds a replica must have been ready for its restart budget to be whole again."""

    suspect_s: float = Field(default=10.0, gt=0)
    """Seconds without a batch, with work in hand and no prefill under way, after which a replica is
    shown as SUSPECT; `engine.watchdog_timeout` ends it."""

    @field_validator("kv_hand_off", "weights_from_peer", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        """YAML reads a bare `on` or `off` as a truth value."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class DeploymentSpec(_Section):
    """One model, one drafter, some replicas, a tree policy."""

    name: str = "overstory"
    """Name of the deployment: of its Serve application, controller and placement groups."""

    model: str = Field(min_length=1)
    """Target model: a built-in name (`overstory-tiny`) or a folder in Hugging Face format, present
    on every node. A path starting with `.` is relative to the deployment file."""

    drafter: str | None = Field(default=None, min_length=1)
    """DFlash drafter of the model: a built-in name (`overstory-tiny-drafter`) or a folder, as for
    `model`. Unset: plain decoding, and `tree.budget` must be 0."""

    served_model_name: str = ""
    """Name that clients ask for. Unset: the last part of `model`."""

    replicas: int = Field(default=1, ge=1, le=1024)
    """Whole copies of the model."""

    tree: TreeSpec = TreeSpec()
    resources: ResourceSpec = ResourceSpec()

    engine: dict[str, Any] = {}
    """SGLang server arguments by SGLang's names (`tp_size`, `context_length`,
    `mem_fraction_static`, ...). What Overstory sets itself is refused. `page_size` is 1 where
    nothing is said; other powers of two are in docs/ddtree.md."""

    environment: dict[str, str] = {}
    """Environment variables of the ranks (`SGLANG_...`, `NCCL_...`). What Overstory and Ray set
    themselves is refused."""

    gateway: GatewaySpec = GatewaySpec()
    control: ControlSpec = ControlSpec()

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", value):
            raise ValueError(
                "wanted 1 to 40 lower-case letters, digits and inner dashes (it names Ray actors)"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _derive_served_name(cls, data: Any) -> Any:
        model = data.get("model") if isinstance(data, dict) else None
        if isinstance(model, str) and not data.get("served_model_name"):
            return {**data, "served_model_name": model.rstrip("/").rsplit("/", 1)[-1]}
        return data

    @field_validator("environment", mode="before")
    @classmethod
    def _check_environment(cls, given: Any) -> dict[str, str]:
        return check_environment(given)

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        # Without resources (at fault themselves): as on a GPU, where less is refused.
        resources = info.data.get("resources")
        return check_engine_args(given, resources.device if resources else "cuda")

    @model_validator(mode="after")
    def _check_drafter(self) -> "DeploymentSpec":
        if self.drafter is None and self.tree.budget > 0:
            raise ValueError(
                f"drafter is missing but tree.budget is {self.tree.budget}; "
                "name a drafter or set tree.budget: 0"
            )
        if self.tree.policy == "auto" and (self.tree.budget == 0 or self.tree.spine_first):
            raise ValueError(
                "tree.policy: auto chooses best-first trees of at most tree.budget nodes; got "
                f"tree.budget: {self.tree.budget}, tree.spine_first: {self.tree.spine_first}; "
                "give it a budget and no spine_first, or set tree.policy: fixed"
            )
        return self

    @model_validator(mode="after")
    def _check_pages(self) -> "DeploymentSpec":
        page_size = self.engine.get("page_size") or 1
        if page_size > 1 and self.control.defrag_every_s > 0:
            raise ValueError(
                f"control.defrag_every_s is {self.control.defrag_every_s:g} with engine.page_size: "
                f"{page_size}; relocation passes move single slots: set engine.page_size: 1, or "
                "control.defrag_every_s: 0"
            )
        return self

    @property
    def hands_over_kv(self) -> bool:
        """`control.kv_hand_off`, decided."""
        return self._decided(self.control.kv_hand_off)

    @property
    def hands_over_weights(self) -> bool:
        """`control.weights_from_peer`, decided."""
        return self._decided(self.control.weights_from_peer)

    def _decided(self, wanted: str) -> bool:
        return wanted == "on" or (wanted == "auto" and self.resources.device == "cuda")

    @property
    def tp_size(self) -> int:
        """Ranks of one replica."""
        return self.engine.get("tp_size", 1)


def _deep_set(document: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for depth, key in enumerate(parents):
        child = document.setdefault(key, {})
        if not isinstance(child, dict):
            where = ".".join(parents[: depth + 1])
            raise SpecError([f"{dotted}: {where} is {child!r}, not a section with keys"])
        document = child
    document[last] = value


def parse_override(text: str) -> tuple[str, Any]:
    """`tree.budget=15` as a dotted key and a value in YAML spelling; `SpecError` without a `=`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SpecError([f"{text!r}: wanted KEY=VALUE, for example tree.budget=15"])
    return key.strip(), read_yaml(value, f"--set {key.strip()}")


_PATHS = ("model", "drafter")
_GATEWAY_PATHS = ("api_keys_file", "tls_cert_file", "tls_key_file")


def _resolve_relative(document: dict[str, Any], folder: Path) -> None:
    gateway = document.get("gateway")
    _resolve_keys(document, _PATHS, folder)
    if isinstance(gateway, dict):
        _resolve_keys(gateway, _GATEWAY_PATHS, folder)


def _resolve_keys(section: dict[str, Any], keys: Sequence[str], folder: Path) -> None:
    for key in keys:
        value = section.get(key)
        if isinstance(value, str) and value.startswith((".", "~")):
            section[key] = str((folder / Path(value).expanduser()).resolve())


def parse_spec(document: Any, source: str = "deployment") -> DeploymentSpec:
    """A spec from plain data (as `yaml.safe_load` gives it).

    Raises:
        SpecError: one line for each thing that is wrong, each naming its dotted key.
    """
    if not isinstance(document, dict):
        raise SpecError([f"{source}: got {type(document).__name__}, wanted keys such as `model:`"])
    try:
        return DeploymentSpec.model_validate(document)
    except ValidationError as error:
        raise from_validation_error(error, DeploymentSpec) from error


def load_spec(
    path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()
) -> DeploymentSpec:
    """The deployment in `path`, with `overrides` (`["tree.budget=15"]` or a mapping) laid over it.

    Raises:
        SpecError: file missing or not YAML, unknown keys, wrong types or values.
    """
    path = Path(path).expanduser()
    try:
        document = read_yaml(path.read_text(), str(path))
    except OSError as error:
        raise SpecError([f"{path}: cannot be read ({error.strerror})"]) from error
    except UnicodeDecodeError as error:
        raise SpecError([f"{path}: is not valid YAML: {error}"]) from error
    if document is None:
        raise SpecError([f"{path}: is empty; it needs at least `model:`"])
    if isinstance(document, dict):
        pairs = (
            overrides.items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
        )
        for key, value in pairs:
            _deep_set(document, key, value)
        _resolve_relative(document, path.resolve().parent)
    return parse_spec(document, str(path))
