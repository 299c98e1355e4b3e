"""Remembers which machines could move between which clusters, and which pairs of clusters to ask about next.

docs/spec/exchange.md §4.1, §6. An answer counts while the questions of both clusters are the same objects as when it
was given. This module does not search or act.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from bigfleet.exchange.between_clusters import ClusterSide, MoveQuestion, Pair, best_moves, pairs_of, side_of
from bigfleet.exchange.price_paths import PricePaths, judged
from bigfleet.exchange.values import ClusterExchanges, ExchangeProposal, ExchangeQuestion, WaitReason, WholeCluster

#: Pairs that are asked about in one look.
PAIRS_MAX: Final = 8


class Answered(NamedTuple):
    """What one cluster was asked, and what the answer was."""

    question: ExchangeQuestion
    exchanges: ClusterExchanges


@dataclass(frozen=True, slots=True)
class ChosenMove:
    """A move that is shown."""

    move: ExchangeProposal
    #: The taker with the machines that would come.
    taker: WholeCluster | None


@dataclass(frozen=True, slots=True)
class _Known:
    """The last answer about a pair."""

    giver: ExchangeQuestion
    taker: ExchangeQuestion
    #: The look in which it was given.
    look: int
    #: None: no machine should move.
    chosen: ChosenMove | None


class MoveBook:
    """The answers about pairs of clusters, and the moves that follow from them."""

    def __init__(self) -> None:
        self._sides: dict[str, tuple[Answered, ClusterSide | None]] = {}
        self._known: dict[Pair, _Known] = {}
        #: By giver.
        self._chosen: dict[str, ChosenMove] = {}
        #: Giver and machines of the moves that were ready at the last choice.
        self._ready: frozenset[tuple[str, tuple[str, ...]]] = frozenset()

    @property
    def moves(self) -> dict[str, ExchangeProposal]:
        """The moves to show, by giver; no cluster is in two of them."""
        return {giver: chosen.move for giver, chosen in self._chosen.items()}

    def of(self, giver: str) -> ChosenMove | None:
        """Return the move of a giver."""
        return self._chosen.get(giver)

    def due(self, found: Mapping[str, Answered], barred: Collection[str]) -> list[Pair]:
        """Return the pairs to ask about: those of which a move was known first, then those asked longest ago.

        `found` are the clusters that may give and take, `barred` those that may give only. Answers about other pairs
        are dropped.
        """
        sides: dict[str, tuple[Answered, ClusterSide | None]] = {}
        for cluster, answered in found.items():
            known = self._sides.get(cluster)
            is_same = known is not None and all(a is b for a, b in zip(known[0], answered, strict=True))
            sides[cluster] = known if known is not None and is_same else (answered, side_of(*answered))
        self._sides = sides
        possible = [side for _, side in sides.values() if side is not None]
        pairs = pairs_of(
            replace(side, rented_usd_per_unit=0.0) if side.cluster in barred else side for side in possible
        )
        self._known = {pair: self._known[pair] for pair in pairs if pair in self._known}
        return sorted((pair for pair in pairs if not self._counts(pair, found)), key=self._turn)[:PAIRS_MAX]

    def answered(
        self,
        pair: Pair,
        found: Mapping[str, Answered],
        *,
        look: int,
        asked: MoveQuestion | None,
        move: ExchangeProposal | None,
    ) -> None:
        """Remember the answer about a pair of clusters that were as in `found`."""
        chosen = None if asked is None or move is None else ChosenMove(move, asked.taker.whole)
        self._known[pair] = _Known(found[pair.giver].question, found[pair.taker].question, look, chosen)

    def choose(self, found: Mapping[str, Answered], paths: PricePaths) -> list[str]:
        """Choose the moves to show among the answers that count; return the givers whose move has become ready."""
        known = {
            (pair.giver, chosen.move.taker, chosen.move.machine_ids): replace(chosen, move=judged(chosen.move, paths))
            for pair, answer in self._known.items()
            if (chosen := answer.chosen) is not None and self._counts(pair, found)
        }
        best = best_moves((giver, chosen.move) for (giver, _, _), chosen in known.items())
        self._chosen = {giver: known[(giver, move.taker, move.machine_ids)] for giver, move in best.items()}
        before = self._ready
        self._ready = frozenset((giver, move.machine_ids) for giver, move in best.items() if move.waits_for is None)
        return [giver for giver, _ in sorted(self._ready - before)]

    def set_waits(self, giver: str, waits_for: WaitReason | None) -> None:
        """Show until the next choice what the move of a giver waits for."""
        chosen = self._chosen[giver]
        self._chosen[giver] = replace(chosen, move=replace(chosen.move, waits_for=waits_for))

    def forget(self, clusters: Iterable[str]) -> None:
        """Show no move of these clusters until the next choice."""
        gone = set(clusters)
        self._chosen = {
            giver: chosen for giver, chosen in self._chosen.items() if not gone & {giver, chosen.move.taker}
        }

    def _counts(self, pair: Pair, found: Mapping[str, Answered]) -> bool:
        known, giver, taker = self._known.get(pair), found.get(pair.giver), found.get(pair.taker)
        if known is None or giver is None or taker is None:
            return False
        return known.giver is giver.question and known.taker is taker.question

    def _turn(self, pair: Pair) -> tuple[bool, int]:
        """Return the key by which pairs take turns; of equals the most promising comes first."""
        known = self._known.get(pair)
        return known is None or known.chosen is None, 0 if known is None else known.look
