"""The text of workers: tokens and bytes (`codec`), the ends of steps and answers on the device
(`step_automata`), what was written (`transcript`), and what counts as an answer (`answers`)."""
