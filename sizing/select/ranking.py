"""The ranking of sizes for a phase of a model's life: candidates by dollars, with reasons.

Where the answer differs from common advice, it says so.
"""

from sizing.select.machine_candidates import training_candidates, working_candidates
from sizing.select.requirements import Candidate, Prices, Requirements, SizeSelection
from sizing.select.serving_candidates import serving_candidates


def select(requirements: Requirements, prices: Prices) -> SizeSelection:
    """Rank the sizes that meet the requirements: supported ones first, then by dollars."""
    left_out: dict[str, str] = {}
    if requirements.phase in ("serve-online", "serve-batch"):
        found = serving_candidates(requirements, prices, left_out)
    elif requirements.phase in ("train", "tune"):
        found = training_candidates(requirements, prices, left_out)
    else:
        found = working_candidates(requirements, prices, left_out)
    found.sort(key=lambda each: (not each.is_supported, each.usd, each.size))
    return SizeSelection(
        candidates=tuple(found), left_out=left_out, differs=_differences(requirements, found)
    )


def _differences(requirements: Requirements, found: list[Candidate]) -> tuple[str, ...]:
    """Return where common advice differs, and why it no longer holds."""
    if requirements.phase == "experiment":
        return ("T2 for experiments: a legacy family, replaced by T3.",)
    if requirements.phase in ("train", "tune"):
        return ("P3 for training: a legacy family, absent from the EC2 API's data since 2026.",)
    if requirements.phase != "serve-online" or not found:
        return ()
    best, lines = found[0], []
    by_size = {each.size: each for each in found}
    inf1, g4dn = by_size.get("inf1.xlarge"), by_size.get("g4dn.xlarge")
    if inf1 and best is not inf1:
        lines.append(
            f"Inf1 because it costs less than G4dn: ${inf1.usd:.2f} per million would be the "
            "lowest here, but the Neuron SDK no longer supports Inf1."
        )
    if g4dn and best.usd < g4dn.usd and best.size.startswith(("c5", "m5")):
        lines.append(
            f"Compare accelerators: at this demand they idle (g4dn.xlarge: busy "
            f"{g4dn.figures['busy_percent']:.0f} %, ${g4dn.usd:.2f} per million), and {best.size} "
            f"meets the goal for ${best.usd:.2f}."
        )
    m5 = by_size.get("m5.large")
    if requirements.model and m5 and best is not m5 and "throughput" in m5.figures:
        lines.append(
            f"m5.large is a bottleneck: {m5.figures['instances']} of them carry the load for "
            f"${m5.usd:.2f} per million (its throughput is {m5.figures['throughput']}; measure it)."
        )
    return tuple(lines)
