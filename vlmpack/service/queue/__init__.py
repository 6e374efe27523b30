"""The request queue, its journal, the state folder, and the thread that owns the engine."""
