"""Checks a composition against its problem in plain integers, with no code of the planner."""

from collections import Counter, defaultdict

from bigfleet.planner import Composition, Problem, UnhostedReason


def faults(problem: Problem, composition: Composition) -> list[str]:
    """Return one sentence per broken rule."""
    found = list(_counts(problem, composition))
    on: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for claim in composition.claims:
        if claim.machines < 1 or claim.count < 1:
            found.append(f"{claim} claims nothing")
        for number in range(claim.first, claim.first + claim.machines):
            on[claim.machine_class, number][claim.shape] += claim.count
    for (kind, number), pods in on.items():
        if number >= composition.counts[kind]:
            found.append(f"machine {number} of class {kind} does not exist")
        found += _machine(problem, kind, pods)
    found += _shapes(problem, composition, on)
    found += _useless(problem, composition)
    return found


def _useless(problem: Problem, composition: Composition) -> list[str]:
    """Return a sentence for each class of which machines are added that can host no pod with a claim."""
    hosted = {claim.shape for claim in composition.claims}
    return [
        f"{kind.key}: {composition.added[k]} added that can host no pod"
        for k, kind in enumerate(problem.classes)
        if composition.added[k]
        and not any(
            problem.shapes[s].matches >> k & 1
            and all(wants <= has for wants, has in zip(problem.shapes[s].request, kind.supply, strict=True))
            for s in hosted
        )
    ]


def _counts(problem: Problem, composition: Composition) -> list[str]:
    found = []
    for kind, retained, added in zip(problem.classes, composition.retained, composition.added, strict=True):
        if not 0 <= retained <= kind.held:
            found.append(f"{kind.key}: {retained} retained of {kind.held}")
        if added < 0 or (kind.stock is not None and added > kind.stock):
            found.append(f"{kind.key}: {added} added of {kind.stock}")
    return found


def _machine(problem: Problem, kind: int, pods: Counter[int]) -> list[str]:
    found = []
    of = problem.classes[kind]
    for d, name in enumerate(problem.dimensions):
        taken = sum(problem.shapes[s].request[d] * n for s, n in pods.items())
        if taken > of.supply[d]:
            found.append(f"{of.key}: {taken} of {name} taken, {of.supply[d]} there")
    for s, n in pods.items():
        asked = problem.shapes[s]
        if not asked.matches >> kind & 1:
            found.append(f"{of.key} does not match shape {s}")
        if asked.max_per_machine and n > asked.max_per_machine:
            found.append(f"{of.key}: {n} pods of shape {s}, at most {asked.max_per_machine}")
        if asked.is_pinned and of.probability:
            found.append(f"{of.key} may be interrupted, shape {s} is pinned")
    return found


def _shapes(problem: Problem, composition: Composition, on: dict[tuple[int, int], Counter[int]]) -> list[str]:
    found = []
    hosted: Counter[int] = Counter()
    for pods in on.values():
        hosted.update(pods)
    unhosted: Counter[int] = Counter()
    for each in composition.unhosted:
        unhosted[each.shape] += each.count
    gangs: defaultdict[str, set[str | None]] = defaultdict(set)
    for s, asked in enumerate(problem.shapes):
        if hosted[s] + unhosted[s] != asked.count:
            found.append(f"shape {s}: {hosted[s]} hosted and {unhosted[s]} not, of {asked.count}")
        where = Counter(
            {kind: sum(n[s] for (k, _), n in on.items() if k == kind) for kind in range(len(problem.classes))}
        )
        if asked.gang:
            gangs[asked.gang].update(problem.classes[k].domain(asked.same_key) for k, n in where.items() if n)
            if hosted[s] and unhosted[s]:
                found.append(f"shape {s}: part of a gang is hosted")
        if asked.spread is not None and not unhosted[s]:
            found += _spread(problem, s, where)
    found += [f"gang {gang} lies in {domains}" for gang, domains in gangs.items() if len(domains) > 1]
    return found


def _spread(problem: Problem, position: int, where: Counter[int]) -> list[str]:
    asked = problem.shapes[position]
    assert asked.spread is not None
    by_domain: Counter[str | None] = Counter()
    for k, kind in enumerate(problem.classes):
        has_room = all(wants <= has for wants, has in zip(asked.request, kind.supply, strict=True))
        may_host = asked.matches >> k & 1 and has_room and not (asked.is_pinned and kind.probability)
        # A domain of which nothing is held may be left out.
        if may_host and (kind.held or where[k]):
            by_domain[kind.domain(asked.spread.key)] += where[k]
    placed = [n for domain, n in by_domain.items() if domain is not None]
    if placed and max(placed) - min(placed) > asked.spread.skew:
        return [f"shape {position}: pods by domain {dict(by_domain)}, skew {asked.spread.skew}"]
    return []


def reasons(composition: Composition) -> dict[int, UnhostedReason]:
    """Return why pods are not hosted, by shape."""
    return {each.shape: each.reason for each in composition.unhosted}
