"""ZipMoE's decisions: what to fetch in which order, and which form of which expert to keep. Pure functions and one state machine."""
