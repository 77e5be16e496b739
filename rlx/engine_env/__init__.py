"""Scripts that run in the engines' own environment (Python 3.11, torch, SGLang); rlx starts them and imports none."""
