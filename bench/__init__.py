"""Benches: what the planner reaches, beside its bounds and its peers. `python -m bench --list` names them."""
