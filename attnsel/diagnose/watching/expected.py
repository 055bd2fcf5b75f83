"""What a test expects of the attention that ran in it, and what did not hold: ``@pytest.mark.attention``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attnsel.backends.registry import CANDIDATES, complete
from attnsel.base.suggestions import candidate_suggestion
from attnsel.diagnose.models.calls import BY_HAND
from attnsel.diagnose.watching.judge import Watched, by_hand
from attnsel.diagnose.watching.record import Site
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.selection.evaluate import mask_bytes, memory_parts
from attnsel.verdicts.requirements import size


def kernels_of(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """The candidates that a marker names. Raises InvalidInput for one that there is not."""
    names = (given,) if isinstance(given, str) else tuple(given or ())
    if any(name not in CANDIDATES for name in names):
        complete()
    for name in names:
        if name not in CANDIDATES and name != BY_HAND:
            meant = candidate_suggestion(str(name), CANDIDATES)
            raise InvalidInput("kernel", name, meant or f"must be of {', '.join(CANDIDATES)}")
    return names


def broken(watched: Watched, kernels: tuple[str, ...], max_score_bytes: int | None) -> list[str]:
    """What of the attention that ran is not as expected, in words; also that none ran.

    ``kernels``: those that may run; empty for every one but a slow path that a better one was there for.
    ``max_score_bytes``: of scores and masks of queries x keys that one call may make.
    """
    env = watched.process.environment
    if not watched.sites:
        return ["no attention ran that attnsel.watch() sees", *watched.process.unseen]
    return [text for site in watched.sites for text in _broken(site, env, kernels, max_score_bytes)]


def _broken(site: Site, env: Environment, kernels: tuple[str, ...], most: int | None) -> Iterator[str]:
    ran = BY_HAND if by_hand(site) else site.candidate or site.forward
    slow = by_hand(site) or (site.candidate in CANDIDATES and CANDIDATES[site.candidate].last_resort)
    other = ran not in kernels if kernels else slow and bool(site.best) and site.best != site.candidate
    if other:
        wanted = " or ".join(kernels) or site.best
        yield _told(site, f"{ran} ran, expected was {wanted}")
    made = score_bytes(site, env)
    if most is not None and made > most:
        yield _told(site, f"{ran} made {size(made)} of scores or masks, expected were at most {size(most)}")


def _told(site: Site, text: str) -> str:
    why = "".join(f"\n  why: {one}" for one in site.why)
    return f"{site.where}: {text}{why}" + (f"\n  fix: {site.fix}" if site.fix else "")


def score_bytes(site: Site, env: Environment) -> int:
    """Bytes of queries x keys of one call: what attention by hand wrote, what its kernel's record says, and
    the mask that it was given. A bias that was written to the scores is in what was written."""
    p, made = site.params, sum(one.bytes for one in site.materialised)
    if p is None or p.max_seqlen_q < 2:
        return made
    if site.candidate in CANDIDATES:
        made += sum(amount for what, amount in memory_parts(site.candidate, p, env) if what == "scores")
    return made if p.tensors.mask is None else made + mask_bytes(p)
