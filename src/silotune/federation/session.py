"""A silo's side of one run: backbone, tokenised rows and state, and what is answered to the coordinator's requests.

Torch runs here, in one thread. Everything that leaves is made by `Session.answer`.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from silotune import __version__
from silotune.assembly import Federation, build, make_method, make_silos, read_config
from silotune.backbone import Backbone
from silotune.config import Config
from silotune.config.aggregation import AggregationConfig
from silotune.config.schema import PartitionConfig, SamplingConfig
from silotune.data.loading import load_silos
from silotune.data.tasks import SiloData, Splits
from silotune.errors import InputError, SilotuneError
from silotune.evaluation.instances import keep_instances
from silotune.evaluation.scores import results, scores
from silotune.federation.agreement import check_agreed, check_federated, read_travelled, travelling
from silotune.federation.handshake import HandshakeRefused, Identity, check_identity, text_digest, tokenizer_digest
from silotune.federation.ledger import Ledger
from silotune.federation.local import LocalConfig
from silotune.federation.protocol import Frame, ProtocolError, decode, mapping
from silotune.federation.rows import read_rows
from silotune.federation.store import Store, state_name
from silotune.messages import read_broadcast
from silotune.methods import Method
from silotune.participant import Answer, Spent
from silotune.parts import flatten
from silotune.pretrained import load_backbone
from silotune.silo import Silo, SiloState

_COUNTS = ("rows", "steps", "real_tokens", "padded_tokens")


class _Unnumbered(Silo):
    """A silo that does not say how many rows it has."""

    @property
    def rows(self) -> int:
        return 1


class Session:
    """Answers for one silo.

    Args:
        local: the operator's configuration.
    """

    def __init__(self, local: LocalConfig) -> None:
        self.local = local
        self._backbone: tuple[tuple[str, bool, str], Backbone] | None = None
        self._text = ""
        self._federation: Federation | None = None
        self._agreed: Config | None = None
        if local.config is not None:
            self._agreed = read_config(local.config)

    def warm(self) -> None:
        """Load backbone and rows for the agreed configuration, before anybody asks."""
        if self.local.config is not None:
            text = Path(self.local.config).read_text(encoding="utf-8")
            try:
                read_travelled(text)
            except InputError:  # as a person writes it; the backbone will be there, rows come with the first request
                text = travelling(read_config(self.local.config), [self.local.name])
            self._prepare(text, None)

    def answer(self, data: bytes) -> bytes:
        """The answer to a request; a reason where there is none. Tracebacks stay in the silo's own log."""
        try:
            return self._answer(decode(data)).encode()
        except HandshakeRefused as error:
            return self._reason("refused", str(error))
        except ProtocolError as error:
            return self._reason("failed", f"request: {error}")
        except SilotuneError as error:
            return self._reason("failed", self._without_paths(str(error)))
        except Exception as error:  # the text may quote rows: only its kind leaves
            traceback.print_exc()
            return self._reason("failed", f"{type(error).__name__} (see the worker's log)")

    def _without_paths(self, reason: str) -> str:
        """Where things lie on this machine is nobody else's business."""
        local = self.local
        paths = [local.folder, local.rows, local.backbone, local.start, local.secret, local.config]
        paths.append(None if local.data is None else local.data.path)
        for path in sorted({path for path in paths if path and "/" in path}, key=len, reverse=True):
            reason = reason.replace(path, f"…/{Path(path).name}")
        return reason

    def _reason(self, kind: str, reason: str) -> bytes:
        print(f"silotune worker {self.local.name!r}: {kind}: {reason}", file=sys.stderr, flush=True)
        return Frame(kind, {"silo": self.local.name, "reason": reason}).encode()

    def _answer(self, request: Frame) -> Frame:
        run, text, said = mapping(request.fields, "run", "config", "identity")
        theirs = Identity.read(said)
        if theirs.version != __version__:
            raise HandshakeRefused(
                f"silo {self.local.name!r}: another silotune: {__version__}, the coordinator's: {theirs.version}"
            )
        federation = self._prepare(str(text), theirs)
        if request.kind == "hello":
            return self._hello(federation)
        store = Store(Path(self.local.folder), str(run))
        if request.kind in ("round", "final"):
            return self._train(federation, store, request)
        if request.kind == "score":
            return self._score(federation, store, request)
        raise ProtocolError(f"unknown request {request.kind[:20]!r}")

    # -- once per run --------------------------------------------------------------------------------------------------

    def _prepare(self, text: str, theirs: Identity | None) -> Federation:
        """Backbone, rows and parts for a configuration; kept until another one comes."""
        if self._federation is None or self._text != text:
            self._federation, self._text = None, ""
            self._federation = self._build(text, theirs)
            self._text = text
        if theirs is not None:
            check_identity(self.local.name, theirs, self._identity(self._federation))
        return self._federation

    def _build(self, text: str, theirs: Identity | None) -> Federation:
        config = read_travelled(text)
        if self._agreed is not None:
            try:
                check_agreed(config, self._agreed)
            except InputError as error:
                raise HandshakeRefused(f"silo {self.local.name!r}: another {error}") from error
        check_federated(config)
        self._check_shared(config)
        method = make_method(config)
        config = self._own(config)
        backbone = self._load(config, method)
        if theirs is not None:  # before anything that fails for want of the right backbone
            found = self._said(text, backbone, config)
            check_identity(self.local.name, theirs, found)
        data = self._rows(config)
        federation = build(config, backbone, [SiloData(self.local.name, data.task, Splits())])
        tokenise = method.setting.head.tokeniser(backbone, config.train.max_length)
        federation.silos = make_silos([data], tokenise, method)
        federation.texts = {self.local.name: len(data.splits.train[0].texts)}
        return federation

    def _check_shared(self, config: Config) -> None:
        if config.aggregation.name == "samples" and "rows" not in self.local.share:
            raise HandshakeRefused(
                f"silo {self.local.name!r}: aggregation=samples weighs silos by their rows, and this one does not say "
                "how many it has; allowed: uniform, median, trimmed-mean, krum, multi-krum"
            )
        if config.privacy.secret is not None and self.local.secret is None:
            raise HandshakeRefused(f"silo {self.local.name!r}: its noise needs a secret; its silo config names none")
        if config.uplink.noise is not None and self.local.secret is None and not self.local.seeded_noise:
            raise HandshakeRefused(
                f"silo {self.local.name!r}: noise from the run's seed hides nothing from the coordinator, who knows "
                "the seed; its silo config needs secret (or seeded_noise: true, for a rehearsal)"
            )
        if config.start is not None and self.local.start is None:
            raise HandshakeRefused(f"silo {self.local.name!r}: the run starts from a LoRA; its silo config needs start")

    def _own(self, config: Config) -> Config:
        """The coordinator's configuration with this machine's paths, for a federation of this silo alone."""
        update: dict[str, Any] = {
            "backbone": self.local.backbone,
            "start": None if config.start is None else self.local.start,
            "threads": self.local.threads or config.threads,
            "sampling": SamplingConfig(),
            "aggregation": AggregationConfig(name="uniform"),
            "partition": PartitionConfig(),
            "privacy": config.privacy.model_copy(update={"secret": self.local.secret}),
            "silos": [] if self.local.data is None else [self.local.data],
        }
        return config.model_copy(update=update)

    def _load(self, config: Config, method: Method) -> Backbone:
        wanted = (config.precision, method.setting.tuner.trains_backbone, method.setting.head.model_class)
        if self._backbone is None or self._backbone[0] != wanted:
            self._backbone = None
            precision, keep_master, model_class = wanted
            loaded = load_backbone(
                self.local.backbone, precision=precision, keep_master=keep_master, model_class=model_class
            )
            self._backbone = wanted, loaded
        return self._backbone[1]

    def _rows(self, config: Config) -> SiloData:
        try:
            if self.local.rows is not None:
                return read_rows(Path(self.local.rows), self.local.name)
            return load_silos(config)[0]
        except InputError as error:  # its text may quote a cell
            print(f"silotune worker: {error}", file=sys.stderr, flush=True)
            raise InputError(f"silo {self.local.name!r}: its rows cannot be used (see the worker's log)") from None

    def _said(self, text: str, backbone: Backbone, config: Config) -> Identity:
        return Identity(
            version=__version__,
            config=text_digest(text),
            backbone=backbone.fingerprint,
            tokenizer=tokenizer_digest(backbone),
            precision=backbone.precision,
            method=config.method.name,
        )

    def _identity(self, federation: Federation) -> Identity:
        said = self._said(self._text, federation.backbone, federation.config)
        return Identity(**(said.fields() | {"shapes": federation.coordinator.expected.shapes}))

    def _hello(self, federation: Federation) -> Frame:
        task, silo = federation.tasks[self.local.name], federation.silos[self.local.name]
        fields: dict[str, Any] = {
            "silo": self.local.name,
            "identity": self._identity(federation).fields(),
            "task": asdict(task) | {"labels": list(task.labels)},
            "texts": federation.texts[self.local.name],
            "share": list(self.local.share),
        }
        if "rows" in self.local.share:
            fields["rows"] = silo.rows
        return Frame("hello", fields)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _train(self, federation: Federation, store: Store, request: Frame) -> Frame:
        """A local round, or the final phases; the same question gets the same answer, without training twice."""
        number, base, keep = mapping(request.fields, "round", "base", "keep")
        (broadcast,) = mapping(request.blobs, "broadcast")
        final = request.kind == "final"
        name = state_name(int(number), final)
        judge = bool(request.fields.get("judge")) and not final
        asked = {
            "kind": request.kind,
            "judge": str(judge),
            "base": str(base),
            "broadcast": hashlib.sha256(broadcast).hexdigest(),
            "config": text_digest(self._text),
        }
        known = store.answered(name, asked)
        if known is not None:
            return known
        store.forget({*map(str, keep), str(base)}, before=int(number))
        silo = self._silo(federation, store, str(base))
        judged = self._judged(federation, silo, broadcast, ["validation"], store) if judge else {}
        participant = federation.participant()
        if final:
            made = participant.final(silo, broadcast)
        else:
            ledger, run = Ledger(Path(self.local.folder)), store.path.name
            made = participant.round(silo, broadcast, ledger.spent(run) if participant.privacy else Spent())
            if participant.privacy and made.message:
                ledger.record(run, name, participant.privacy.epsilon_round)
        assert silo.state is not None, "a silo that trained has a state"
        store.write(name, silo.state.flat())
        answer = self._shared_answer(made, int(number), name)
        if judge:  # of the round before: its shared parts are what this round begins with
            answer.fields["scores"] = judged
        store.keep_answer(name, asked, answer)
        return answer

    def _shared_answer(self, made: Answer, number: int, name: str) -> Frame:
        metrics = {key: value for key, value in made.metrics.items() if self._may_leave(key)}
        fields = {"silo": self.local.name, "round": number, "state": name, "metrics": metrics, "note": made.note}
        return Frame("answer", fields, {"message": made.message})

    def _may_leave(self, metric: str) -> bool:
        kind = "rows" if metric in _COUNTS else "seconds" if metric == "seconds" else "loss"
        return kind in self.local.share

    def _score(self, federation: Federation, store: Store, request: Frame) -> Frame:
        """Scores of the aggregated shared parts with this silo's own private ones."""
        base, splits = mapping(request.fields, "base", "splits")
        (broadcast,) = mapping(request.blobs, "broadcast")
        silo = self._silo(federation, store, str(base))
        found = self._judged(federation, silo, broadcast, [str(split) for split in splits], store)
        return Frame("scores", {"silo": self.local.name, "scores": found})

    def _judged(
        self, federation: Federation, silo: Silo, broadcast: bytes, splits: list[str], store: Store
    ) -> dict[str, Any]:
        """The scores that may leave, of a broadcast's shared parts with the silo's present private ones."""
        federation.silos = {self.local.name: silo}
        federation.coordinator.shared, _ = read_broadcast(broadcast, federation.coordinator.expected)
        if splits == ["validation"]:
            found: dict[str, Any] = {"validation": scores(federation, "validation")[self.local.name]}
        else:
            found = results(federation)[self.local.name]
            keep_instances(store.path, [silo])
        return {key: value for key, value in found.items() if key == "metric" or key in self.local.share}

    def _silo(self, federation: Federation, store: Store, base: str) -> Silo:
        """The silo at one of its states; the empty name is that before its first round."""
        silo = federation.silos[self.local.name]
        if "rows" not in self.local.share and not isinstance(silo, _Unnumbered):
            silo = _Unnumbered(silo.name, silo.train, silo.evaluations, instances=silo.instances)
            federation.silos = {self.local.name: silo}
        silo.state = None
        if base:
            kept = SiloState.from_flat(store.read(base))
            wanted = {
                name: tensor.shape for name, tensor in flatten(federation.training.state_of(silo).private).items()
            }
            if {name: tensor.shape for name, tensor in flatten(kept.private).items()} != wanted:
                raise InputError(f"silo {self.local.name!r}: its state {base!r} is of another method or tuner")
            silo.state = kept
        return silo
