"""Locks by which threads take turns, and which a fork does not leave taken."""

from __future__ import annotations

import os
import threading


class Turns:
    """A lock, `with turns.lock:`; a process that is forked while another thread has it, begins with a new one."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.Lock()
