"""Making a drafter for a target from the target's own text."""
