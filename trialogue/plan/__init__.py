"""What a run will need, before it is paid for: `plan` calculates it, `doctor` looks at the machine."""
