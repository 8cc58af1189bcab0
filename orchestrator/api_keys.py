"""API keys: drawn here, kept as salted hashes, read anew when their file changes.

A file has one key a line: `NAME SCOPE sha256:SALT:HASH`, `SCOPE` being `user` or `admin`; empty
lines and those that begin with `#` do not count. To revoke a key, delete its line.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

logger = logging.getLogger(__name__)

Scope = Literal["user", "admin"]
"""`user` may generate; `admin` may also read metrics and use `/admin`."""

PREFIX = "ovs-"
"""What a drawn key begins with, so that scanners for leaked secrets can find one."""

_LOOK_EVERY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9_.@\-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{32}):([0-9a-f]{64})")


class ApiKeyError(ValueError):
    """A key file or variable that cannot be used."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's name, what it may do, and how it is recognised."""

    name: str
    scope: Scope
    salt: str
    digest: str

    def matches(self, secret: str) -> bool:
        """Whether `secret` is the key; takes as long for a wrong one."""
        return hmac.compare_digest(_digest(self.salt, secret), self.digest)

    def line(self) -> str:
        """As a file has it."""
        return f"{self.name} {self.scope} sha256:{self.salt}:{self.digest}"


def draw_key(name: str, scope: Scope) -> tuple[str, ApiKey]:
    """A new secret, which is shown once, and the key that is kept.

    Raises:
        ApiKeyError: the name has other characters than letters, digits and `_.@-`.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, hashed(name, scope, secret)


def hashed(name: str, scope: Scope, secret: str) -> ApiKey:
    """The key for a secret that there is; `ApiKeyError` as for `draw_key`."""
    if not _NAME.fullmatch(name):
        raise ApiKeyError(f"key name {name!r}: wanted 1 to 64 letters, digits and _ . @ -")
    salt = secrets.token_hex(16)
    return ApiKey(name, scope, salt, _digest(salt, secret))


def parse_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises:
        ApiKeyError: with the line at fault.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{source}, line {number}"
        parts = line.split()
        match = _HASH.fullmatch(parts[-1])
        if len(parts) != 3 or match is None:
            raise ApiKeyError(f"{where}: wanted NAME SCOPE sha256:SALT:HASH (`overstory key new`)")
        name, scope = parts[0], next((s for s in get_args(Scope) if s == parts[1]), None)
        if scope is None:
            raise ApiKeyError(f"{where}: scope is {parts[1]!r}, wanted user or admin")
        if name in keys:
            raise ApiKeyError(f"{where}: a key {name} is there already")
        keys[name] = ApiKey(name, scope, match[1], match[2])
    return tuple(keys.values())


def keys_of_variable(name: str, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Keys of an environment variable: secrets with commas between, `admin:` before an admin's.

    Raises:
        ApiKeyError: it is not set, or empty.
    """
    secrets_given = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
    if not secrets_given:
        raise ApiKeyError(
            f"gateway.api_keys_env: the variable {name} is not set where the gateway runs"
        )
    keys = []
    for number, given in enumerate(secrets_given, 1):
        scope: Scope = "admin" if given.startswith("admin:") else "user"
        keys.append(hashed(f"{name}-{number}", scope, given.removeprefix("admin:")))
    return tuple(keys)


class KeyRing:
    """The keys in force. Not for several threads at once.

    A file that has changed is looked at no more than once a second, by whoever asks for a key; one
    that cannot be read any more leaves the keys as they were, and says so in the log.

    Args:
        file: key file, if any.
        fixed: keys from elsewhere.
        clock: seconds.
    """

    def __init__(
        self,
        file: Path | None = None,
        fixed: tuple[ApiKey, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the file; `ApiKeyError` if that fails."""
        self._file = file
        self._fixed = fixed
        self._clock = clock
        self._seen: object = None
        self._looked_s = clock()
        self._keys: tuple[ApiKey, ...] = fixed
        if file is not None:
            self.reload()

    def reload(self) -> int:
        """Read the file now.

        Returns:
            the number of keys in force.

        Raises:
            ApiKeyError: it cannot be read, or not understood; the keys stay as they were.
        """
        if self._file is not None:
            seen = _stamp(self._file)
            try:
                text = self._file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ApiKeyError(f"{self._file}: cannot be read: {error}") from error
            self._keys = (*self._fixed, *parse_keys(text, str(self._file)))
            self._seen = seen
        return len(self._keys)

    def find(self, secret: str) -> ApiKey | None:
        """The key for a secret."""
        self._look()
        found = None
        for key in self._keys:  # all of them: the time tells nothing
            if key.matches(secret):
                found = key
        return found

    def _look(self) -> None:
        if self._file is None or self._clock() - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = self._clock()
        stamp = _stamp(self._file)
        if stamp == self._seen:
            return
        self._seen = stamp  # a broken file is complained of once
        try:
            logger.warning("%s has changed: %d API keys in force", self._file, self.reload())
        except ApiKeyError as error:
            logger.error("API keys stay as they were: %s", error)


def key_ring(file: str | None, variable: str | None) -> KeyRing | None:
    """The keys of a deployment's settings; None where it has none, which lets everybody in.

    Raises:
        ApiKeyError: the file or the variable cannot be used here.
    """
    if file is None and variable is None:
        return None
    fixed = () if variable is None else keys_of_variable(variable, os.environ)
    return KeyRing(None if file is None else Path(file), fixed)


def _stamp(file: Path) -> object:
    try:
        seen = os.stat(file)
    except OSError as error:
        return error.errno
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


def _digest(salt: str, secret: str) -> str:
    """Drawn secrets have 256 bits, so that a fast hash is as good as a slow one."""
    return hashlib.sha256(f"{salt}:{secret}".encode("utf-8", "surrogatepass")).hexdigest()
