"""SGLang as the policy engine: token ids in and out over HTTP, weights swapped in place, restarted when it dies.

The server is a child of this process, or one that runs already (``urls``). Weights arrive as flat buckets through shared
memory (CPU) or CUDA IPC (GPU). A swap either ends with every weight in place, flushed caches and the new version, or the
engine refuses to generate:

    pause -> resume weights -> buckets, the last one flushes -> checksums -> resume KV -> continue
                 |                                                  |
                 +--- the server dies ------------------------------+--- differ ---> start it again, all from the snapshot

The draw of a token depends on what else is in the batch: ``Sampling.seed`` is not used here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx2
import torch

from ..records import Completion, VersionSpan
from .base import EngineError, Sampling
from .buckets import Bucket, BucketBuffer, Checksums, Snapshot
from .server import CPU_OPTIONS, Server, answers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPARE_CONTEXT = 8  # SGLang keeps a few positions of its context for itself


class SGLangSettings(Protocol):
    """What is read of the configuration's ``[engine]`` table."""

    @property
    def max_batch(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def python(self) -> str | None: ...
    @property
    def urls(self) -> tuple[str, ...]: ...
    @property
    def bucket_mb(self) -> int: ...
    @property
    def pause(self) -> str: ...
    @property
    def start_timeout_s(self) -> float: ...
    @property
    def max_restarts(self) -> int: ...


class Gone(Exception):
    """The server does not answer any more, or gave an answer after which it cannot be trusted."""


@dataclass
class Partial:
    """A completion that may arrive in parts: an aborted request goes on from where it was cut."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def add(self, reply: dict[str, Any]) -> str:
        """Returns the finish reason: stop, length or abort."""
        meta, begin = reply["meta_info"], len(self.ids)
        entries = meta.get("output_token_logprobs") or []
        ids, finish = [entry[1] for entry in entries], str(meta["finish_reason"]["type"])
        if any(entry[0] is None for entry in entries) or (finish != "abort" and ids != reply["output_ids"]):
            raise EngineError("SGLang's log-probs do not cover the sampled tokens")
        self.ids += ids
        self.logprobs += [min(entry[0], 0.0) for entry in entries]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(entries)}]
        for span in spans:
            end = min(span["end"], len(entries))
            self._add_span(VersionSpan(begin + span["start"], begin + end, int(span["version"])))
        return finish

    def _add_span(self, span: VersionSpan) -> None:
        if span.end <= span.start:
            return
        if self.spans and self.spans[-1].version == span.version:
            self.spans[-1] = VersionSpan(self.spans[-1].start, span.end, span.version)
        else:
            self.spans.append(span)


class SGLangEngine:
    """See ``PolicyEngine``. ``folder`` gets the server's log, its config.json and the snapshot of the weights.

    ``sends_weights`` is False on ranks that share an attached server with the rank that does send them.
    """

    def __init__(
        self, settings: SGLangSettings, model: Mapping[str, Any], device: torch.device | str, folder: Path,
        options: Mapping[str, Any] | None = None, rank: int = 0,
    ):  # fmt: skip
        self.settings, self.device = settings, torch.device(device)
        self.context, self.weight_version = settings.context, -1
        self.busy_s, self.num_restarts = 0.0, 0
        self.folder = Path(folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.dtype = DTYPES[(options or {}).get("dtype") or model.get("torch_dtype") or "float32"]
        self._buffer = BucketBuffer(settings.bucket_mb << 20, self.dtype, self.device)
        self._snapshot, self._expected = Snapshot(self.folder), dict[str, str]()
        self._server: Server | None = None
        if settings.urls:
            self.url, self.sends_weights = settings.urls[rank % len(settings.urls)], rank < len(settings.urls)
        else:
            self.url, self.sends_weights = "", True
            self._server = self._make_server(model, options or {})
        self._control = httpx2.Client(timeout=httpx2.Timeout(600.0, connect=10.0))
        self._client: httpx2.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.RLock()  # one swap, restart, sleep or wake at a time
        self._incarnation = 0  # of the server: a failure seen by many requests restarts it once
        self._asleep: set[str] = set()
        self._swapping = False
        self._num_running, self._busy_since = 0, 0.0
        self._closed = False

    def _make_server(self, model: Mapping[str, Any], options: Mapping[str, Any]) -> Server:
        """The server starts from a shape alone: its weights always come from the trainer."""
        shape = {name: value for name, value in model.items() if not name.endswith("_token_id")}  # stop ids come per call
        shape["max_position_embeddings"] = max(self.context + SPARE_CONTEXT, shape.get("max_position_embeddings", 0))
        (self.folder / "config.json").write_text(json.dumps(shape))
        cpu = self.device.type == "cpu"
        defaults: dict[str, Any] = {
            "model_path": self.folder, "load_format": "dummy", "skip_tokenizer_init": True, "skip_server_warmup": True,
            "sleep_on_idle": True, "grammar_backend": "none", "dtype": str(self.dtype).removeprefix("torch."),
            "context_length": self.context + SPARE_CONTEXT, "max_running_requests": self.settings.max_batch,
        }  # fmt: skip
        if cpu:
            defaults |= CPU_OPTIONS | {"max_total_tokens": self.settings.max_batch * (self.context + SPARE_CONTEXT)}
        else:
            defaults |= {"base_gpu_id": self.device.index or 0, "enable_memory_saver": True}
        log = self.folder / "sglang.log"
        return Server(
            self.settings.python, defaults | dict(options), log, cpu=cpu, timeout_s=self.settings.start_timeout_s
        )

    # ---- generation
    async def generate(self, ids: list[int], sampling: Sampling, session: str) -> Completion:
        if not 0 < len(ids) < self.context:
            raise ValueError(f"prompt of {len(ids)} tokens does not fit a context of {self.context}")
        limit = min(sampling.max_new_tokens, self.context - len(ids))
        part, finish, num_failures = Partial(), "abort", 0
        while finish == "abort" and len(part.ids) < limit:
            await self._weights_ready()
            incarnation, before = self._incarnation, len(part.ids)
            try:
                finish = part.add(await self._request(ids + part.ids, limit - len(part.ids), sampling))
            except Gone as error:
                num_failures += 1
                if num_failures > self.settings.max_restarts:
                    raise EngineError(f"the SGLang server failed {num_failures} times in one request: {error}") from error
                await asyncio.to_thread(self._recover, incarnation)
                continue
            if finish == "abort" and len(part.ids) == before:  # a pause: new requests wait in the server
                num_failures += 1
                if num_failures > 100:
                    raise EngineError("SGLang aborted a request again and again")
                await asyncio.sleep(0.05)
        stopped = finish == "stop" and part.ids[-1] in sampling.stop_ids
        return Completion(
            ids=part.ids, logprobs=part.logprobs, finish="stop" if stopped else "length",
            weight_version=part.spans[-1].version, version_spans=part.spans if len(part.spans) > 1 else [],
        )  # fmt: skip

    async def _weights_ready(self) -> None:
        while self._swapping:
            await asyncio.sleep(0.01)
        if self._asleep:  # SGLang does not survive a request that comes then
            await asyncio.to_thread(self.wake)
        if self.weight_version < 0:
            raise EngineError("the engine has no weights yet: call load_weights first")

    async def _request(self, ids: list[int], max_new_tokens: int, sampling: Sampling) -> dict[str, Any]:
        rid = uuid.uuid4().hex  # of one length: SGLang takes an id for the prefix of longer ones
        body = {
            "rid": rid, "input_ids": ids, "return_logprob": True, "extra_key": self._cache_key,
            "sampling_params": {
                "temperature": sampling.temperature, "max_new_tokens": max_new_tokens,
                "stop_token_ids": list(sampling.stop_ids), "skip_special_tokens": False,
            },
        }  # fmt: skip
        self._began()
        try:
            return await self._ask("/generate", body)
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(rid))
            raise
        finally:
            self._ended()

    async def _abort(self, rid: str) -> None:
        with contextlib.suppress(Gone, EngineError):  # then nothing runs there
            await self._ask("/abort_request", {"rid": rid})

    async def score(self, ids: list[int]) -> list[float]:
        """Log-probs of ids[1:] given what stands before each, at temperature 1."""
        await self._weights_ready()
        body = {
            "input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "extra_key": self._cache_key,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        }  # fmt: skip
        reply = await self._ask("/generate", body)
        return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:  # connections belong to the loop that opened them
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            self._client = httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=10.0), limits=limits)
            self._loop = loop
        try:
            reply = await self._client.post(self.url + path, json=body)
        except httpx2.TransportError as error:
            raise Gone(f"{type(error).__name__} {error}") from error
        if reply.status_code >= 500:
            raise Gone(f"{path}: {reply.status_code} {reply.text[:300]}")
        if reply.status_code != 200:
            raise EngineError(f"SGLang refused {path}: {reply.text[:500]}")
        return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else None

    def _began(self) -> None:
        if self._num_running == 0:
            self._busy_since = time.perf_counter()
        self._num_running += 1

    def _ended(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self.busy_s += time.perf_counter() - self._busy_since

    @property
    def _cache_key(self) -> str:
        """Part of the key of cached prefixes: none is ever shared by two versions of the weights, flushed or not."""
        return f"weights {self.weight_version}"

    def release(self, session: str) -> None:
        """Nothing: SGLang's radix cache finds the prefix of a trial by its tokens and drops the least recently used."""

    # ---- weights
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """While requests run they are paused as ``settings.pause`` says; call it from another thread then.

        Raises EngineError when the weights are not proven to be in place; the engine generates nothing then.
        """
        if not self.sends_weights:
            for _ in tensors:  # gathering is collective
                pass
            self.weight_version = version
            return
        with self._changes_weights(version):
            checksums = Checksums() if self._verifies else None
            self._snapshot.drop_next()
            stream = self._buffer.fill(tensors, checksums)
            try:
                sent = self._swap(self._kept(stream), version, checksums)
            finally:
                for bucket in stream:  # the server died: what is left still has to be gathered
                    self._snapshot.add(bucket)
            self._snapshot.adopt_next()
            self._expected = checksums.expected() if checksums else {}
            if not sent:
                self._roll_forward(version)

    @contextlib.contextmanager
    def _changes_weights(self, version: int) -> Iterator[None]:
        """Requests wait until it is over. The engine has ``version`` then, or none when it raised."""
        with self._lock:
            self._swapping, self.weight_version = True, -1
            try:
                yield
                self.weight_version = version
            finally:
                self._swapping = False

    @property
    def _verifies(self) -> bool:
        """On a GPU SGLang hashes with a kernel of its own, so only equality of engines could be told."""
        return self.device.type == "cpu"

    def _kept(self, stream: Iterator[Bucket]) -> Iterator[Bucket]:
        for bucket in stream:
            self._snapshot.add(bucket)
            yield bucket

    def _swap(self, buckets: Iterator[Bucket], version: int, checksums: Checksums | None) -> bool:
        """One attempt; False when the server is gone or holds something else afterwards."""
        try:
            if self._server is not None and not self._server.alive:
                self._start()
            self._post("/pause_generation", {"mode": self.settings.pause})
            keeps_cache = self.settings.pause == "in_place" and self._num_running > 0
            self._resume({"weights"} & self._asleep)
            self._post("/begin_weight_update", {})
            for bucket in buckets:
                body: dict[str, Any] = {
                    "serialized_named_tensors": [bucket.payload()], "load_format": "flattened_bucket",
                    "flush_cache": bucket.last and not keeps_cache,
                }  # fmt: skip
                if bucket.last:
                    body["weight_version"] = str(version)
                self._post("/update_weights_from_tensor", body)
            self._post("/end_weight_update", {})
            self._verify(checksums.expected() if checksums else self._expected)
            self._resume(set(self._asleep))
            self._post("/continue_generation", {})
        except Gone as error:
            self._note(f"swap to version {version} failed: {error}")
            return False
        return True

    def _verify(self, expected: dict[str, str]) -> None:
        if not expected:
            return
        found = self._post("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        if wrong:
            raise Gone(f"checksums differ after the swap: {', '.join(wrong[:5])}")

    def _roll_forward(self, version: int) -> None:
        """The server anew, with all buckets of the snapshot. The old server is never continued with half of them."""
        for _ in range(self.settings.max_restarts):
            self._start()
            if self._swap(self._snapshot.read(self._buffer), version, None):
                return
        raise EngineError(f"version {version} could not be put into SGLang; see {self.folder / 'notes'}")

    def _recover(self, incarnation: int) -> None:
        """Called by every request that saw the server fail; the first one restarts it, with the current weights."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._incarnation != incarnation:
                return
            version = self.weight_version
            with self._changes_weights(version):
                self._roll_forward(version)

    def _start(self) -> None:
        self._incarnation += 1
        self._asleep = set()
        if self._server is not None:
            self.num_restarts += self._incarnation > 1
            self._server.start()
            self.url = self._server.url
            return
        if not self._wait_for_attached():
            raise EngineError(f"no SGLang server answers at {self.url}")
        with contextlib.suppress(Gone):  # a swap that was broken off left its session open
            self._post("/end_weight_update", {})

    def _wait_for_attached(self) -> bool:
        until = time.monotonic() + self.settings.start_timeout_s
        while not answers(self.url):
            if time.monotonic() > until:
                return False
            time.sleep(1.0)
        return True

    def flush(self) -> None:
        """Drops cached prefixes. Refused while requests run."""
        self._control_or_fail("/flush_cache", {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            reply = self._control.post(self.url + path, json=body)
        except httpx2.TransportError as error:
            raise Gone(f"{path}: {type(error).__name__} {error}") from error
        if reply.status_code != 200:
            raise Gone(f"{path}: {reply.status_code} {reply.text[:500]}")
        return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else None

    def _note(self, text: str) -> None:
        with (self.folder / "notes").open("a") as notes:
            notes.write(f"{time.strftime('%F %T')} {text}\n")

    # ---- memory
    def sleep(self, tags: tuple[str, ...] = ("kv_cache", "weights")) -> None:
        """Gives the memory of ``tags`` to the trainer. SGLang dies of this while requests run, so it is refused then."""
        with self._lock:
            if self._num_running > 0:
                raise EngineError("the engine cannot sleep while requests run: drain it first")
            wanted = sorted(set(tags) - self._asleep)
            if wanted and self.weight_version >= 0 and self.sends_weights:
                self._control_or_fail("/release_memory_occupation", {"tags": wanted})
                self._asleep |= set(wanted)

    def wake(self, tags: tuple[str, ...] = ("kv_cache", "weights")) -> None:
        """Takes the memory back. Weights that were let go come from the snapshot: what they held is lost."""
        with self._lock:
            if "weights" in tags and "weights" in self._asleep and self._snapshot:
                version = self.weight_version
                with self._changes_weights(version):
                    if not self._swap(self._snapshot.read(self._buffer), version, None):
                        self._roll_forward(version)
            self._resume(set(tags) & self._asleep)

    def _resume(self, tags: set[str]) -> None:
        if tags:
            self._post("/resume_memory_occupation", {"tags": sorted(tags)})
            self._asleep -= tags

    def _control_or_fail(self, path: str, body: dict[str, Any]) -> None:
        try:
            self._post(path, body)
        except Gone as error:
            raise EngineError(str(error)) from error

    def health(self) -> bool:
        return answers(self.url, timeout_s=60.0)

    def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.stop()
        self._control.close()
        self._snapshot.close()
        self._buffer.free()
