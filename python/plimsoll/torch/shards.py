"""The shards of a rank, and the steps that the shards of all ranks make together.

A step of several shards is a two-phase commit: all prepare it, the ranks vote, and then all make it. If ranks die in
between, the next trainer makes the last step if all had prepared it and one has made it.
"""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import torch

from plimsoll import resident
from plimsoll.client import Request, Session
from plimsoll.delta import Delta
from plimsoll.errors import PlimsollError
from plimsoll.protocol import Opened
from plimsoll.service import Service, shared_service
from plimsoll.torch import environment, layout
from plimsoll.torch.algorithm import Numbers, Rule
from plimsoll.torch.modes import Async, ZenFlow
from plimsoll.torch.ranks import Count, Ranks, Vote, is_distributed, mesh_for
from plimsoll.torch.settings import Settings
from plimsoll.torch.shard import Shard
from plimsoll.torch.slot import DtypeGroup
from plimsoll.torch.state_dict import take_weights
from plimsoll.torch.trained import Trained
from plimsoll.torch.transfer import HostTransfer, transfer_for


class Shards:
    """One shard for each dtype group, in the order of their names."""

    def __init__(self, shards: List[Shard], trained: Trained, ranks: Ranks, transfer: HostTransfer, settings: Settings):
        self.trained, self.ranks, self.transfer = trained, ranks, transfer
        #: The service that the states are in, where it is this process's own.
        self.service: Optional[Service] = None
        #: The step of the states when they were attached to or loaded.
        self.resumed_step = 0
        self._shards, self._settings = shards, settings
        self._counted = 0  # the step of the other ranks, as this one last heard of it
        self._left_alone: Mapping[str, Sequence[int]] = {}  # places of parameters, in the step that was prepared

    @classmethod
    def divide(
        cls,
        groups: Sequence[Dict[str, Any]],
        names: Dict[torch.Tensor, str],
        model: Optional[torch.nn.Module],
        settings: Settings,
        announces: bool,
    ) -> "Shards":
        """The shards for the parameters in groups. They are not opened."""
        trained = Trained(groups, names)
        mesh = mesh_for([p for g in groups for p in g["params"]], names, settings.sharding, settings.process_group, model)
        divided = layout.divide(groups, names, layout.embeddings_of(model), mesh)
        transfer = transfer_for(trained.device)
        shared = transfer.shares and settings.sharding is None and not trained.are_sharded
        apart = isinstance(settings.overlap, (Async, ZenFlow))
        found = [
            DtypeGroup(name, pieces, mesh, transfer, shared, apart, _gradient_type(pieces) if mesh.is_local else None)
            for name, pieces in sorted(divided.items())
            if pieces
        ]
        shards = [Shard(group, announces=announces, waits=settings.gradients == "step") for group in found]
        return cls(shards, trained, Ranks(mesh), transfer, settings)

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, i: int) -> Shard:
        return self._shards[i]

    @property
    def sessions(self) -> List[Session]:
        return [shard.session for shard in self if shard.session]

    @property
    def step(self) -> int:
        return max((session.step for session in self.sessions), default=self._counted)

    # Opening

    def open(self, rule: Callable[[], Rule]) -> List[Opened]:
        """Opens the sessions of all ranks. Returns what they found."""

        def open_own() -> List[Opened]:
            self.trained.check_memory()
            self._open(rule())
            return self._found()

        every = self.ranks.agree("opening the state", open_own)
        if any(o.attached and not o.initialized for of_rank in every for o in of_rank):
            # A process died before all states were complete.
            return self.open_anew()
        return [o for of_rank in every for o in of_rank]

    def open_anew(self) -> List[Opened]:
        """Gives back the states that were found, on all ranks, and begins with new ones."""
        every = self.ranks.agree("opening the state anew", self._open_anew)
        return [o for of_rank in every for o in of_rank]

    def _open_anew(self) -> List[Opened]:
        self.transfer.release()
        for shard in self:
            shard.open_anew()
        return self._found()

    def _found(self) -> List[Opened]:
        return [session.opened for session in self.sessions]

    def _open(self, rule: Rule) -> None:
        path, instance = self._settings.socket, 0
        if path is None:
            self.service, instance = shared_service(self._settings.job, self._settings.tier, self._settings.memory)
            path = self.service.socket
        for shard in self:
            shard.open(path, {**self._document(shard, rule), "instance": instance}, rule.first_moments)

    def _document(self, shard: Shard, rule: Rule) -> Dict[str, Any]:
        settings, mesh = self._settings, self.ranks.mesh
        # Ranks whose states are copies of each other have a session each.
        rank, world = mesh.number, mesh.size
        if not self.ranks.are_heard:
            rank, world = environment.rank(), environment.world()
        part = f"{settings.name}.{shard.name}" if settings.name else shard.name
        if isinstance(settings.overlap, ZenFlow):
            part += ".zenflow"  # only an optimizer that knows of important columns may attach to it
        document = {
            "schema": "plimsoll.open/1",
            "job": settings.job,
            "rank": rank,
            "world": world,
            "local_world": environment.local_ranks(world),
            "part": part,
            "optimizer": rule.optimizer,
            "state": settings.state if shard.name == "bf16" else "fp32",
            "moments": settings.moments,
            "parameter": shard.name,
            "gradient": shard.group.gradient,
            "groups": len(rule.first_moments),
            "parameters": [
                {
                    "name": p.name,
                    "shape": list(p.shape),
                    "group": p.group,
                    "moments": layout.moments_of(p, settings.moments),
                    "first": p.first,
                    "count": p.count,
                }
                for p in shard.group.own
            ],
        }
        if settings.retracts_of(shard.name):
            document["retracts"] = True
        cpus = environment.optimizer_cpus()
        return {**document, "cpus": cpus} if cpus else document

    def start(self, found: List[Opened]) -> None:
        """Begins at one step with all shards of all ranks: new shards get the model's parameters, others stay as they
        are.
        """
        last = max((f.step for f in found), default=0)
        if last and not self.ranks.are_heard and is_distributed() and torch.distributed.get_world_size() > 1:
            raise PlimsollError(
                f"this rank has found its state at step {last}, but cannot ask the other ranks for theirs: give the "
                "optimizer the ranks that hold the same state (process_group=torch.distributed.group.WORLD, or model= "
                "wrapped by DistributedDataParallel), or sharding"
            )
        are_initialized = all(f.initialized for f in found)

        if can_go_back(found, last):
            last -= 1

        def begin() -> None:
            if any(f.step > last for f in found):
                self._go_back(last)
            elif any(f.step != last for f in found):
                self._catch_up(last, found)
            for shard in self if not are_initialized else ():
                shard.initialize()

        self.ranks.agree("opening the state", begin)
        self.adopt(last)

    def _catch_up(self, last: int, found: Sequence[Opened]) -> None:
        """Makes the last step if it was not made, because the job ended between two requests for it.

        Every rank finds the same of all. The first request came when all had prepared the step.
        """
        behind = [f for f in found if f.step != last]
        grad_scales = {f.asked_factor for f in found if f.step == last == f.asked_step}
        if len(grad_scales) != 1 or any(f.step != last - 1 or f.prepared_step != last for f in behind):
            steps = ", ".join(map(str, sorted({f.step for f in found})))
            raise PlimsollError(
                f"the shards of this job are at different steps ({steps}), and not all prepared the last one; give the job "
                "another name (job=, PLIMSOLL_JOB) or start the service again, and load the last checkpoint"
            )
        for session in self.sessions:
            if session.step != last:
                session.begun(session.begin(min(grad_scales), None, wait=True))

    def _go_back(self, step: int) -> None:
        """Gives up the last step of the shards that had committed it to a tier when the power was lost: others had not."""
        for session in self.sessions:
            if session.step > step:
                session.go_back(step)

    def adopt(self, step: int) -> None:
        """Continues from the states as they are, which are all of that step: the model gets their parameters."""
        self.resume(step)
        for shard in self:
            shard.parameters.adopt()
        if any(shard.group.shares_parameters for shard in self):
            resident.trim_heap()  # what the model's parameters were in

    def resume(self, step: int) -> None:
        self.resumed_step = self._counted = step

    def refuse_resumed(self) -> None:
        """Refuses a first step of gradients that were computed without the state."""
        if self.resumed_step > 0:
            raise RuntimeError(
                f"the service has the state of step {self.resumed_step} of job {self._settings.job}, and these gradients were computed without it: "
                "read optimizer.resumed_step before the first forward pass and go on from there, or give the job another name"
            )

    # The state

    def check_steps(self) -> None:
        """Refuses to continue if a step, or a load, was interrupted between two shards."""
        for shard in self:
            if shard.session:
                shard.session.drain()
                if not shard.session.initialized:
                    raise PlimsollError(
                        f"the {shard.name} state of a checkpoint was loaded, but the others' was not: load again before "
                        "anything else"
                    )
        steps = {shard.name: shard.session.step for shard in self if shard.session}
        if len(set(steps.values())) > 1:
            found = ", ".join(f"{name}: {step}" for name, step in steps.items())
            raise PlimsollError(
                f"the parameters are at different steps ({found}): a step was interrupted in between; load the last checkpoint"
            )

    def take_weights(self) -> None:
        """Brings the weights that the program has changed in the model into the states, which are all of one step."""
        self.check_steps()
        take_weights(self)

    def set_step(self, what: str, step: int) -> None:
        """Records the step of the state, once all shards of all ranks have it. Until then they are a mixture, as one
        shard tells.
        """

        def say() -> None:
            for session in self.sessions:
                session.set_step(step, keep_own=True)

        self.ranks.agree(what, say)

    def will_change(self) -> None:
        for shard in self:
            shard.parameters.will_change()

    # Steps

    def prepare(self, numbers: Numbers, left_alone: Mapping[str, Sequence[int]]) -> Optional[Numbers]:
        """The first phase, once all gradients are there. Returns what :meth:`make` sends: nothing if the shards have
        it. ``left_alone`` are the places of parameters without gradients, by shard.
        """
        self._left_alone = left_alone
        sessions = self.sessions
        if len(sessions) == 1 and not self.ranks.are_heard:
            return numbers
        for shard in (shard for shard in self if shard.session):
            shard.session.prepare(numbers, left_alone.get(shard.name, ()))
        return None

    def sum_of_squares(self) -> float:
        """The sum of the squares of this rank's gradients, over its shards."""
        asked = [(session, session.norm()) for session in self.sessions]
        return sum(session.norm_result(request) for session, request in asked)

    def drain(self) -> None:
        """Waits for all answers: then all requests to prepare have succeeded."""
        for session in self.sessions:
            session.drain()

    def count(self, vote: Vote) -> Count:
        """The votes of all ranks. When it returns, all shards have prepared the step."""
        total = torch.tensor(vote.to_add_up([s.step for s in self.sessions]), dtype=torch.float64, device=self.trained.device)
        self.ranks.reduce(total)
        return Count.of(total.tolist())

    def check(self, vote: Vote, count: Count) -> None:
        """Refuses the step on all ranks unless their votes are for it."""
        if count.failures:

            def fail() -> None:
                if vote.failure is not None:
                    raise vote.failure

            self.ranks.agree(f"step {self.step + 1}", fail)
        count.check(vote, self.ranks.mesh.size)
        if count.having:
            self._counted = count.step

    def make(self, grad_scale: float, numbers: Optional[Numbers], *, awaits: bool) -> None:
        """The second phase: makes the step of every shard, and brings the parameters into the model. Interrupts wait
        for the end.

        Unless it ``awaits`` the step, it returns when the update has begun. The parameters are then missing in the
        model, and arrive one by one.
        """
        step = self._counted = 1 + self.step
        self.will_change()
        for shard in self._shards if not awaits else ():
            # Before the step begins: an interrupt may come as soon as it has.
            shard.gradients.update_begins()
            if not shard.group.apart:
                shard.parameters.expect()

        def make(pulled: List[Shard]) -> None:
            self.drain()
            behind = [shard for shard in self if shard.session and shard.session.step < step]
            begun = [(s.session, self._begin(s, grad_scale, numbers, awaits)) for s in behind]
            for session, request in begun:
                session.begun(request)
            for shard in pulled if awaits else ():
                shard.parameters.pull(after_step=True)

        try:
            make(self._shards)
        except KeyboardInterrupt:
            # Other ranks send what they have only once.
            make([shard for shard in self if not shard.parameters.gathers()])
            raise

    def _begin(self, shard: Shard, grad_scale: float, numbers: Optional[Numbers], awaits: bool) -> Request:
        left_alone = self._left_alone.get(shard.name, ())
        return shard.session.begin(grad_scale, numbers, wait=awaits and shard.group.shares_parameters, left_alone=left_alone)

    @property
    def can_retract(self) -> bool:
        """Whether steps can begin before it is known what becomes of them."""
        return all(session.opened.retracts for session in self.sessions)

    def begin_arriving(self, grad_scale: float, numbers: Numbers, *, speculates: bool) -> None:
        """Begins the step of every shard before its gradients are there. If it ``speculates``, :meth:`decide` follows.

        Each begins alone. If this process ends before all gradients are there, states may be torn or of two steps, which
        the next one finds when it opens them.
        """
        self._counted = 1 + self.step
        for session in self.sessions:
            session.begin(grad_scale, numbers, wait=False, arriving=True, speculates=speculates)

    def decide(self, grad_scale: Optional[float]) -> None:
        """Says what becomes of the step under way: see :meth:`plimsoll.client.Session.decide`."""
        for session, request in [(session, session.decide(grad_scale)) for session in self.sessions]:
            session.result(request)
        self._counted = self.step

    def arrived(self) -> None:
        """Says that all gradients of a step are there that was begun before."""
        for session in self.sessions:
            session.ready(0, session.elements)
        self.drain()

    def pull(self) -> None:
        """Waits for the step that :meth:`make` has begun, and brings the parameters into the model."""
        for shard in self:
            shard.parameters.pull(after_step=True)
            shard.gradients.update_is_over()

    def take_back(self) -> None:
        """Takes back what was prepared: it belongs to no step."""
        for session in self.sessions:
            # Use a request that changes no gradient: after an interrupt it is sent again, when other gradients may be
            # there.
            with contextlib.suppress(PlimsollError):  # the failure is being raised
                session.ready(0, 1)
                session.drain()

    # What steps change

    def delta(self, *, begin: bool = False, whole: bool = False) -> Delta:
        """What the last step has changed: see :meth:`plimsoll.client.Session.delta`."""
        held = [shard for shard in self if shard.session]
        messages = [shard.session.delta(begin=begin, whole=whole) for shard in held]
        return Delta(messages, [{slot.piece.name: slot.in_arena.view(-1) for slot in shard.slots.values()} for shard in held])

    # The end

    def close(self, give_back: bool) -> None:
        for shard in self:
            if self.service is None and not give_back:
                shard.depart()
            if shard.session:
                # A service of this process may have other optimizers, which need the memory.
                shard.session.close(give_back=give_back or self.service is not None, keep_tier=not give_back)

    def give_back_if_new(self) -> None:
        for shard in self:
            shard.give_back_if_new()

    def release(self) -> None:
        """Lets go of sessions and memory, even if the optimizer was not closed."""
        with contextlib.suppress(RuntimeError):  # from a device that has failed: the caller may be raising that
            self.transfer.release()
        for session in self.sessions:
            if self.service is not None and self.service.process.poll() is None:
                with contextlib.suppress(PlimsollError, OSError):  # nobody waits for this
                    session.close(give_back=True, keep_tier=True)  # other users of the service need the memory
            session.abandon()
        self.service = None


def can_go_back(found: Sequence[Opened], last: int) -> bool:
    """Whether all shards can be at the step before the last one, and not all can be at the last one."""
    ahead = [f for f in found if f.step == last]
    behind = [f for f in found if f.step != last]
    return bool(behind) and all(f.initialized and f.step == last - 1 and f.prepared_step != last for f in behind) and all(f.can_go_back for f in ahead)


def _gradient_type(pieces: Sequence[layout.Piece]) -> Optional[str]:
    """The type of gradients that parameters are said to have: None for their own, or where torch does not say it."""
    types = {getattr(piece.parameter, "grad_dtype", None) for piece in pieces}
    return layout.TYPES.get(types.pop()) if len(types) == 1 else None
