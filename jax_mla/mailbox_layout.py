"""Where things lie in the control block of a mailbox, for the kernel and for the host.

A rank has one control block, in memory of its own device. Offsets are bytes; numbers are unsigned.
"""

EPOCH = 0
"""u32: calls that this rank has completed; its lowest bit chooses the half of the mailbox."""
TICKET = 4
"""u32: CTAs of the running call that are done."""
STATE = 8
"""u32: OPEN, or why calls give NaN and neither publish nor wait any more: 1 + the rank whose words
did not come in time, or CLOSED."""
RANK = 12
"""u32: of the device, its place along the mesh axis."""
RANKS = 16
"""u32: size of the mesh axis, at most MAX_RANKS."""
HALF_BYTES = 24
"""u64: of each of the two halves of a mailbox."""
TIMEOUT = 32
"""u64: nanoseconds that a call waits for the words of its peers."""
REPORT = 40
"""u64: address of a u32 that device and host see; a copy of STATE goes there when it changes."""
BOXES = 64
"""u64 [MAX_RANKS]: addresses, as this device sees them, of the mailboxes of all ranks in order."""

MAX_RANKS = 16
CONTROL_BYTES = BOXES + 8 * MAX_RANKS

OPEN, CLOSED = 0, 0xFFFFFFFF
EMPTY = 0xFFFFFFFF
"""A word of a mailbox that no rank has published to."""
WORD_BYTES = 16
"""What a thread publishes, polls and re-arms at once: four words."""
