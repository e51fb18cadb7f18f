"""What a results file says of where it was made."""

from typing import Any

FACTS: dict[str, Any] = {
    "gpu": "GPU",
    "driver": "1.2",
    "jax": "0.10",
    "jax_mla": "0.1",
    "commit": "abc",
    "date": "2026-01-01",
    "clocks_before": {"clocks.sm": "100 MHz"},
    "clocks_after": {"clocks.sm": "200 MHz"},
}
