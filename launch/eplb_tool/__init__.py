"""``moe-ep eplb``: what recorded loads say about placements, before any engine runs."""
