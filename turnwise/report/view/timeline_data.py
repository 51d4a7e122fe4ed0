"""The spans of a profiled run (`timeline.json`, a Chrome trace) for the page."""

import json
from pathlib import Path
from typing import Any

from turnwise.errors import DataError

MAX_SPANS = 60_000
"""Maximum spans that are shown, the longest ones: the others are narrower than a pixel."""


def timeline_data(path: Path) -> dict[str, Any]:
    """The tracks of a trace, each with its spans `[name, start, seconds]`, and the names by number. Raises
    DataError if it isn't a trace."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if _names_a_track(event)}
        spans = [event for event in events if event["ph"] == "X"]
        num_left_out = max(0, len(spans) - MAX_SPANS)
        if num_left_out:
            spans = sorted(spans, key=lambda span: -span["dur"])[:MAX_SPANS]
        tracks: dict[int, list[list[Any]]] = {track: [] for track in names}
        kinds: dict[str, int] = {}
        for span in sorted(spans, key=lambda span: span["ts"]):
            kind = kinds.setdefault(span["name"], len(kinds))
            row = [kind, round(span["ts"] / 1e6, 5), round(span["dur"] / 1e6, 5)]
            tracks.setdefault(span["tid"], []).append(row)
    except (OSError, ValueError, LookupError, TypeError) as fault:
        raise DataError(f"{path} isn't the timeline of a finished run ({fault})") from fault
    listed = [{"name": names.get(track, str(track)), "spans": of_track} for track, of_track in tracks.items()]
    return {"names": list(kinds), "tracks": listed, "left_out": num_left_out}


def _names_a_track(event: dict[str, Any]) -> bool:
    return event["ph"] == "M" and event["name"] == "thread_name"
