"""What all tests share: frameworks, rules, an oracle, drawn cases, planted faults, processes."""
