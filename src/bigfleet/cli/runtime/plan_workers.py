"""Runs the planner in worker processes, so that no plan delays a cycle.

The signals that stop a shard do not reach its workers: their process stops them, and work that this interrupts is
cancelled and has not failed.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from bigfleet.cli.runtime.early_end import end_with_parent
from bigfleet.cli.runtime.kernel_cache import keep_kernels

if TYPE_CHECKING:
    from bigfleet.exchange.between_clusters import MoveQuestion
    from bigfleet.exchange.values import ClusterExchanges, ExchangeProposal, ExchangeQuestion
    from bigfleet.planner.composition import Composition
    from bigfleet.planner.problem import Problem
    from bigfleet.planner.search import Effort

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")

#: Problems that wait in line for each worker, so that none is idle while the next one is made.
WAITING_PER_WORKER = 3


class ProcessPlanWorkers:
    """A few processes that plan; one that dies takes its problem with it and is replaced."""

    def __init__(self, workers: int) -> None:
        """Start no process yet."""
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self._under_way = 0
        self._has_ended = False

    @property
    def free(self) -> int:
        """How many more problems may be handed over now."""
        return max(0, self._workers * (1 + WAITING_PER_WORKER) - self._under_way)

    @property
    def is_idle(self) -> bool:
        """Return whether no work is running or queued."""
        return not self._under_way

    def start(self) -> None:
        """Start one worker unless there is one, so that the first problem does not wait for it."""
        if self._pool is None:
            with _stop_signals_blocked():
                self._started().submit(_work_on, None)

    async def plan(self, problem: "Problem", effort: "Effort") -> "Composition":
        """Return the composition. Raises ProblemFault, and BrokenProcessPool when the worker died."""
        answer = await self._answer(_work_on, (problem, effort))
        assert answer is not None, "a problem has an answer"
        return answer

    async def find_exchanges(self, question: "ExchangeQuestion") -> "ClusterExchanges":
        """Return what can be exchanged. Raises BrokenProcessPool when the worker died."""
        return await self._answer(_search, question)

    async def find_move(self, question: "MoveQuestion") -> "ExchangeProposal | None":
        """Return the move of a pair of clusters. Raises BrokenProcessPool when the worker died."""
        return await self._answer(_search_move, question)

    async def _answer(self, work: "Callable[[_Asked], _Answer]", asked: _Asked) -> _Answer:
        if self._has_ended:
            raise asyncio.CancelledError
        pool = self._started()
        self._under_way += 1
        try:
            with _stop_signals_blocked():
                answer = asyncio.get_running_loop().run_in_executor(pool, work, asked)
            return await answer
        except BrokenProcessPool:
            if self._has_ended:
                raise asyncio.CancelledError from None
            if self._pool is pool:
                self._pool = None
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            self._under_way -= 1

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Spawned, because a fork of a process with threads may inherit locks that are never released.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context, initializer=_begin)
        return self._pool

    def __enter__(self) -> "ProcessPlanWorkers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        pool, self._pool, self._has_ended = self._pool, None, True
        if pool is None:
            return
        # Killed, not awaited: a worker that compiles its loops takes half a minute, and its result is discarded.
        workers = list(pool._processes.values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Have processes that are spawned meanwhile never see SIGINT and SIGTERM; this process gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work_on(asked: "tuple[Problem, Effort] | None") -> "Composition | None":
    """Plan in a worker; without a problem only load the planner and compile its loops."""
    from bigfleet.planner.plan import plan

    if asked is None:
        import_module("bigfleet.planner.compiled")
        return None
    return plan(*asked)


def _search(question: "ExchangeQuestion") -> "ClusterExchanges":
    """Search exchanges in a worker."""
    from bigfleet.exchange.search import find_exchanges

    return find_exchanges(question)


def _search_move(question: "MoveQuestion") -> "ExchangeProposal | None":
    """Search a move in a worker."""
    from bigfleet.exchange.between_clusters import find_move

    return find_move(question)


def _begin() -> None:
    """Have this worker end when the shard does, and keep what it compiles."""
    end_with_parent()
    keep_kernels()
