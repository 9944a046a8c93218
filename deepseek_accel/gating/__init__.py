"""How much a model's loss feels each chosen expert: measured once by `calibrate_gates`, used by `AdaptiveTopK`."""
