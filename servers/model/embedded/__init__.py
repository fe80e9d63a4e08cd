"""A small instruct model on the CPU, behind an engine that continues a cut generation exactly.

Terms: a *sequence* is one row of the model's key-value memory, a *slot* a sequence that a call
decodes in, a *step* one decode of the model for all slots at once, a *prefix* what a call had
generated before it came here. The parts, from the inside out:

- `sampling`, `generation`, `prefix_cache`, `scheduler`, `vocabulary`: decisions, synchronous;
- `prompt`, `toolcalls`: what the model reads and how its reply is read;
- `weights`, `host`, `settings`: what the engine needs to start;
- `llama`: the only module that touches the native library;
- `engine`: the trio shell, `open_engine`.

Invariant: token ids and log-probs of a call depend on its prompt, sampling and weights only; not on
where it was cut, what it was batched with, or what the prefix cache held. `llama.EXACT` names the
settings under which the native library keeps this.
"""
