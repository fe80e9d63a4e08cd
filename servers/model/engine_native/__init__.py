"""A native backend's half of cuts and continuations; `gymtrio/capture/DESIGN.md` is the contract.

- `live_calls`: the calls that can be cut, from their arrival until their reply is handed over;
- `cuts`: makes what they have generated durable, and acknowledges it;
- `continuations`: goes on from such a prefix, or refuses it before anything is generated;
- `backend`: generates for such calls and puts the evidence into their replies;
- `control_routes`: cuts and what the engine is, behind the control token.
"""
