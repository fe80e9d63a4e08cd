"""The OpenAI APIs of an engine: requests read strictly, replies and streams written whole.

Terms: a *choice* is one generation of a request, its *output* what it came to: text or a function
call. The parts, all synchronous:

- `fields`, `requests`: which fields there are, and a request as a `ModelCall`;
- `outputs`, `logprobs`: what every reply tells of an output;
- `chat`, `responses`: replies of the two APIs;
- `reply_stream`, `chat_stream`, `responses_stream`: the same as server-sent events;
- `errors`: refusals in the form that clients of these APIs read.

Invariant: a field that would change what is generated is honoured or refused, never ignored.
"""
