"""The outcomes of a case, in all campaigns of the proof."""

DELIVERED, REFUSED, SILENT, BROKEN = "delivered", "refused", "silent", "broken"
UNNAMED, EXPLAINED = "refused, unnamed", "explained"
WRONG = (SILENT, BROKEN)
OUTCOMES = (DELIVERED, REFUSED, UNNAMED, EXPLAINED, SILENT, BROKEN)
