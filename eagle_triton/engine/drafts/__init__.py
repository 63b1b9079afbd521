"""Who proposes trees: one class for each kind of draft, `Draft` what the engine asks of any of them."""
