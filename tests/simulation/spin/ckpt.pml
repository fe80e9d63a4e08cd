/* The core of the checkpoint protocol, in two halves: prepare, commit, renew, publish, resume by two
   controllers, of which the second believes that the same checkpoint id is its own; and with -DRECOVERY
   what follows a crash of all participants: restore, and the resume after it. Requests may be sent twice and arrive late; replies may never be
   heard; a lease may end at any moment. Checked exhaustively:

     P1  what is published was exported by all before anybody let go        (HARD-2, CTL-4)
     P2  one controller publishes an id                                      (HARD-5)
     P3  after a crash no stale attempt is served                            (HARD-3)
     P4  after a crash a participant opens only when all have restored       (HARD-3, HARD-6)
     P5  nothing is installed over replacements that run                     (HARD-8)
     P6  once every controller is gone, what is held is let go               (CTL-11), with -DLIVENESS

   Each rule can be left out, and then its property fails:
     -DNO_RENEW       publish without a renewal after the last commit        P1
     -DNO_ID_FENCE    an id that was resumed may be held again               P1
     -DNO_NONCE       whoever knows the id is its holder                     P1 or P2
     -DOPEN_AT_START  a crashed participant serves at once                   P3
     -DANY_RESUME     a resume of any id opens one that waits to be restored P4
     -DLATE_RESTORE   a restore is taken whenever nothing is held            P5
     -DNO_LEASE       participants never let go by themselves                P6

   A checkpoint's directory, storage and data calls are not here: the simulation has those. */

#define NP 2            /* participants */
#define RESTORE_ID 2    /* checkpoint 1, and the hold under which a restore runs */
#define I(i, c) ((i) * 3 + (c))

mtype = { PREPARE, COMMIT, RENEW, RESUME, RESTORE };

byte held[NP];          /* id that holds, 0: open */
byte holder[NP];        /* nonce of its controller */
bool ended[6];          /* ids that were resumed here */
#ifdef RECOVERY
bool awaiting[NP] = true;   /* started to be restored */
bool crashed = true;        /* ghost, as all that follow */
#else
bool awaiting[NP] = false;
bool crashed = false;
#endif
bool fenced[NP];        /* stale attempts are refused */
bool running[NP];       /* replacements run */
bool exported[NP];      /* for checkpoint 1, in the holder's hold */
bool broken = false;    /* somebody let go of it before all had exported */
byte restored = 0;
byte published_by = 0;
byte controllers = 2;

chan req[NP] = [2] of { mtype, byte, byte };          /* operation, id, nonce */
chan rep[NP] = [1] of { mtype, byte, byte, bool };

inline release(i) {
  d_step {
    if :: held[i] == 1 && !(exported[0] && exported[1]) -> broken = true :: else fi;
    ended[I(i, held[i])] = true;
    if
    :: held[i] == RESTORE_ID ->
         assert(restored == NP);                      /* P4 */
         running[i] = true
    :: else
    fi;
    held[i] = 0; holder[i] = 0
  }
}

#ifdef NO_NONCE
#define HOLDS(i, c, n) (held[i] == c && c != 0)
#else
#define HOLDS(i, c, n) (held[i] == c && c != 0 && holder[i] == n)
#endif
#ifdef NO_ID_FENCE
#define FRESH(i, c) true
#else
#define FRESH(i, c) (!ended[I(i, c)])
#endif

active [NP] proctype participant() {
  byte i = _pid; mtype op; byte c; byte n; bool ok;
end:
  do
  :: atomic { req[i]?op, c, n ->
     ok = false;
     if
     :: op == PREPARE ->
          if
          :: !awaiting[i] && held[i] == 0 && FRESH(i, c) ->
               held[i] = c; holder[i] = n; ok = true
          :: HOLDS(i, c, n) -> ok = true
          :: else
          fi
     :: op == COMMIT ->
          if :: HOLDS(i, c, n) -> ok = true; exported[i] = true :: else fi
     :: op == RENEW -> ok = HOLDS(i, c, n)
     :: op == RESTORE ->
          if
          :: HOLDS(i, c, n) -> ok = true
#ifdef LATE_RESTORE
          :: held[i] == 0 ->
#else
          :: held[i] == 0 && FRESH(i, c) && !running[i] ->
#endif
               assert(!running[i]);                   /* P5 */
               held[i] = c; holder[i] = n; ok = true;
               if :: awaiting[i] -> restored++ :: else fi;
               awaiting[i] = false; fenced[i] = true
          :: else
          fi
     :: op == RESUME ->
          if
          :: HOLDS(i, c, n) -> release(i); ok = true
#ifdef ANY_RESUME
          :: held[i] == 0 && awaiting[i] ->
               assert(!crashed || restored == NP);    /* P4 */
               awaiting[i] = false; ended[I(i, c)] = true
#endif
          :: held[i] == 0 && !awaiting[i] -> ended[I(i, c)] = true; ok = true
          :: else
          fi
     fi;
     if :: nfull(rep[i]) -> rep[i]!op, c, n, ok :: true fi   /* or the reply is lost */
     }
#ifndef NO_LEASE
  :: held[i] == 1 -> release(i)                              /* the lease ended */
#endif
  :: crashed && !fenced[i] &&                                /* a stale attempt asks */
#ifndef OPEN_AT_START
     !awaiting[i] &&
#endif
     held[i] == 0 -> assert(false)                           /* P3 */
  od
}

/* Ask one participant; retried or not, heard or given up. */
inline ask(i, o, c) {
  if
  :: ok ->
     req[i]!o, c, me;
     if :: me == 1 && nfull(req[i]) -> req[i]!o, c, me :: true fi;
     do
     :: rep[i]?m, k, r, yes -> if :: m == o && k == c && r == me -> ok = yes; break :: else fi
     :: ok = false; break
     od
  :: else
  fi
}

inline checkpoint() {
  ok = true;
  ask(0, PREPARE, 1); ask(1, PREPARE, 1); ask(0, COMMIT, 1); ask(1, COMMIT, 1);
#ifndef NO_RENEW
  ask(0, RENEW, 1); ask(1, RENEW, 1);
#endif
  if
  :: ok && !crashed -> d_step {
       assert(exported[0] && exported[1] && !broken);                    /* P1 */
       assert(published_by == 0 || published_by == me);                  /* P2 */
       published_by = me }
  :: else
  fi;
  if :: ok = true; ask(1, RESUME, 1); ok = true; ask(0, RESUME, 1) :: skip fi   /* or it dies first */
}

#ifndef RECOVERY
active proctype controller() {
  byte me = 1; bool ok; mtype m; byte k; byte r; bool yes;
  checkpoint();
  controllers--
}

active proctype rival() {
  byte me = 2; bool ok; mtype m; byte k; byte r; bool yes;
  checkpoint();
  controllers--
}
#else
/* Checkpoint 1 is published and all participants have died. */
active proctype controller() {
  byte me = 1; bool ok = true; mtype m; byte k; byte r; bool yes;
  ask(0, RESTORE, RESTORE_ID); ask(1, RESTORE, RESTORE_ID);
  if :: ok -> ask(1, RESUME, RESTORE_ID); ok = true; ask(0, RESUME, RESTORE_ID) :: else fi;
  if :: req[0]!RESTORE, RESTORE_ID, me :: true fi          /* overtaken by all that came after */
}

/* Anything of checkpoint 1 that somebody still sends. */
active proctype rival() {
  byte sent = 0;
  do
  :: sent < 3 -> sent++;
     if
     :: req[0]!PREPARE, 1, 2 :: req[1]!PREPARE, 1, 2
     :: req[0]!COMMIT, 1, 2  :: req[1]!COMMIT, 1, 2
     :: req[0]!RESUME, 1, 2  :: req[1]!RESUME, 1, 2
     fi
  :: break
  od
}
#endif

#ifdef LIVENESS
ltl free { [] (controllers == 0 && !crashed -> <> (held[0] == 0 && held[1] == 0)) }
#endif
