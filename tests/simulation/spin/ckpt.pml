/* The core of the checkpoint protocol, in two halves. By default: prepare, commit, renew, publish, resume
   of two controllers, the second of which has an id of its own or believes that the first one's is. With
   -DRECOVERY: what follows a crash of all participants: a restore, which may fail and be taken back,
   another one, and the resume after it.

   The network forgets nothing: what was sent may arrive at any later moment, any number of times, in any
   order, or never; a reply is heard or not, and whoever waits may give up at any moment. So a retry needs
   no rule of its own. A lease may end at any moment, but those of one restore end together: they count
   from one deadline. Checked exhaustively:

     P1  what is published was exported by all before anybody let go         (HARD-2, CTL-4)
     P2  one controller publishes an id                                       (HARD-5)
     P3  after a crash no stale attempt is served                             (HARD-3)
     P4  after a crash a participant opens only when all have restored        (HARD-3, HARD-6)
     P5  nothing is installed over replacements that run                      (HARD-8)
     P6  nothing runs while it is exported, nor goes on before the resume     (I2, STEP-2)
     P7  in the end every episode goes on, whoever has died                   (I29, I30, CTL-11)
     P8  a restore that was resumed by all runs everywhere                    (COORD-3)

   P7 is the claim `free`, under weak fairness; the others are assertions. It is asked with one participant:
   whoever waits for another one may give up, so what one can do among several it can do alone. Each rule
   can be left out, and then its property fails:

     -DNO_RENEW       publish without a renewal after the last commit         P1
     -DNO_ID_FENCE    an id that was resumed may be held again                P1
     -DNO_NONCE       whoever knows the id is its holder                      P1 or P2
     -DNO_WAIT        prepared while an episode runs                          P6
     -DNO_RECHECK     who is woken does not look at the gate again            P6
     -DNO_LEASE       participants never let go by themselves                 P7
     -DNO_WAKE        letting go wakes nobody                                 P7
     -DOPEN_AT_START  a crashed participant serves at once                    P3
     -DANY_RESUME     a resume of any id opens one that waits to be restored  P4
     -DLEASE_OPENS    a restore whose lease ends is resumed                   P4
     -DLATE_RESTORE   a restore is taken whenever nothing is held             P5
     -DLATE_RESUME    a resume of what was taken back is answered as done     P8

   A checkpoint's directory, storage and data calls are not here: the simulation has those. */

#ifndef NP
#define NP 2                        /* participants */
#endif
#define ALL(i) for (i : 0 .. NP - 1)
#if NP == 1
#define EVERY(set, c) (set[AT(0, c)])
#else
#define EVERY(set, c) (set[AT(0, c)] && set[AT(1, c)])
#endif

#ifdef RECOVERY
#define NC 3                        /* a stranger with the checkpoint's id, and two restores of it */
#else
#define NC 2
#endif
#define AT(i, c) ((i) * NC + (c) - 1)   /* c: a controller, or an id */

/* Operations, as bits. */
#define PREPARE 1
#define COMMIT 2
#define RENEW 4
#define RESUME 8
#define RESTORE 16
#define UNDO 32

mtype = { RUNS, PARKED, WOKEN };

byte id_of[NC];                     /* controller to the id that it uses */
byte sent[NP * NC];                 /* what may arrive */
byte waits_for[NC];                 /* the operation whose replies a controller waits for */
bool heard[NP * NC];                /* a good reply to it has come */

byte held[NP];                      /* id that holds, 0: open */
byte holder[NP];                    /* its controller */
bool ended[NP * NC];                /* ids that were resumed here */
mtype episode[NP] = RUNS;

/* Ghosts: what the assertions look at. */
bool exported[NP * NC];             /* for an id */
bool broken[NC];                    /* somebody let go of it before all had exported */
byte published_by[NC];

#ifdef RECOVERY
bool awaiting[NP] = true;           /* to be restored */
bool fenced[NP];                    /* stale attempts are refused */
bool undone[NP * NC];               /* ids whose restore was taken back here */
bool time_is_up[NC];                /* for the leases of an id */
bool restored[NP * NC];             /* ghost: by an id, and not taken back */
bool running[NP];                   /* ghost: replacements run */
#define AWAITS(i) awaiting[i]
#define IN_TIME(c) (!time_is_up[(c) - 1])
#else
#define AWAITS(i) false
#define IN_TIME(c) true
#endif

#ifdef NO_NONCE
#define HOLDS(i, n, c) (held[i] == c)
#else
#define HOLDS(i, n, c) (held[i] == c && holder[i] == n)
#endif
#ifdef NO_ID_FENCE
#define FRESH(i, c) true
#else
#define FRESH(i, c) (!ended[AT(i, c)])
#endif
#ifdef NO_WAIT
#define READY(i) true
#else
#define READY(i) (episode[i] != RUNS)
#endif

#define ANSWER(i, n, op) heard[AT(i, n)] = heard[AT(i, n)] || waits_for[(n) - 1] == op

inline let_go(i) {
  ended[AT(i, held[i])] = true; held[i] = 0; holder[i] = 0;
#ifndef NO_WAKE
  if :: episode[i] == PARKED -> episode[i] = WOKEN :: else fi
#endif
}

inline resume(i) {
#ifdef RECOVERY
  if
  :: held[i] > 1 ->
       assert(EVERY(restored, held[i]));                /* P4 */
       running[i] = true
  :: else
  fi;
#else
  if
  :: EVERY(exported, held[i])
  :: else -> broken[held[i] - 1] = true
  fi;
#endif
  let_go(i)
}

#ifdef RECOVERY
inline take_back(i) {
  restored[AT(i, held[i])] = false; undone[AT(i, held[i])] = true; awaiting[i] = true;
  let_go(i)
}
#endif

/* Something that controller n has sent arrives at participant i. */
inline deliver(i, n) {
  c = id_of[n - 1];
  if
  :: sent[AT(i, n)] & PREPARE && !AWAITS(i) ->
       if :: held[i] == 0 && FRESH(i, c) -> held[i] = c; holder[i] = n :: else fi;
       if :: HOLDS(i, n, c) && READY(i) -> ANSWER(i, n, PREPARE) :: else fi
  :: sent[AT(i, n)] & COMMIT && HOLDS(i, n, c) && READY(i) ->
       assert(episode[i] != RUNS);                                       /* P6 */
       exported[AT(i, c)] = true; ANSWER(i, n, COMMIT)
  :: sent[AT(i, n)] & RENEW && HOLDS(i, n, c) -> ANSWER(i, n, RENEW)
  :: sent[AT(i, n)] & RESUME ->
       if
       :: HOLDS(i, n, c) && IN_TIME(c) -> resume(i); ANSWER(i, n, RESUME)
#ifdef RECOVERY
#ifdef LATE_RESUME
       :: ended[AT(i, c)] -> ANSWER(i, n, RESUME)
#else
       :: ended[AT(i, c)] && !undone[AT(i, c)] -> ANSWER(i, n, RESUME)
#endif
#ifdef ANY_RESUME
       :: held[i] == 0 && awaiting[i] -> assert(false)                      /* P4 */
#endif
#endif
       :: held[i] == 0 && !AWAITS(i) -> ended[AT(i, c)] = true
       :: else
       fi
#ifdef RECOVERY
  :: sent[AT(i, n)] & RESTORE ->
       if
#ifdef LATE_RESTORE
       :: held[i] == 0 ->
#else
       :: held[i] == 0 && FRESH(i, c) && !running[i] ->
#endif
            assert(!running[i]);                                         /* P5 */
            held[i] = c; holder[i] = n;
            awaiting[i] = false; fenced[i] = true; restored[AT(i, c)] = true
       :: else
       fi;
       if :: HOLDS(i, n, c) -> ANSWER(i, n, RESTORE) :: else fi
  :: sent[AT(i, n)] & UNDO ->
       if
       :: HOLDS(i, n, c) -> take_back(i)
       :: held[i] == 0 -> ended[AT(i, c)] = true
       :: else
       fi
#endif
  :: else
  fi
}

proctype participant(byte i) {
  byte c;
end:
  do
  :: atomic { sent[AT(i, 1)] -> deliver(i, 1) }
  :: atomic { sent[AT(i, 2)] -> deliver(i, 2) }
#ifdef RECOVERY
  :: atomic { sent[AT(i, 3)] -> deliver(i, 3) }
  :: d_step { !fenced[i] && held[i] == 0 &&                              /* a stale attempt asks */
#ifndef OPEN_AT_START
       !awaiting[i] &&
#endif
       true -> assert(false) }                                           /* P3 */
#endif
  od
}

proctype lease(byte i) {
end:
  do
#ifdef RECOVERY
  :: atomic { held[i] == 1 -> let_go(i) }
  :: atomic { held[i] > 1 ->
       time_is_up[held[i] - 1] = true;
#ifdef LEASE_OPENS
       resume(i)
#else
       take_back(i)
#endif
     }
#else
  :: atomic { held[i] != 0 -> resume(i) }
#endif
  od
}

#ifndef RECOVERY
proctype rollout(byte i) {
end:
  do
  :: d_step { episode[i] == RUNS && held[i] != 0 -> episode[i] = PARKED }
#ifdef NO_RECHECK
  :: d_step { episode[i] == WOKEN -> episode[i] = RUNS; assert(held[i] == 0) }   /* P6 */
#else
  :: d_step { episode[i] == WOKEN ->
       if :: held[i] == 0 -> episode[i] = RUNS :: else -> episode[i] = PARKED fi }
#endif
  od
}
#endif

/* Send to all, and wait for all to answer well, or give up. */
inline ask(op) {
  d_step {
    ok = false;
    waits_for[n - 1] = op;
    ALL(j) { sent[AT(j, n)] = sent[AT(j, n)] | op; heard[AT(j, n)] = false }
  }
  if
  :: d_step { EVERY(heard, n) -> ok = true }
  :: true
  fi;
  d_step { waits_for[n - 1] = 0; ALL(j) { heard[AT(j, n)] = false } }
}

#ifdef RECOVERY
proctype controller(byte n) {
  byte j; bool ok;
  do
  :: ask(RESTORE);
     if
     :: ok ->
          ask(RESUME);
          if :: ok -> assert(running[0] && running[1]) :: else fi;       /* P8 */
          break
     :: else ->
          d_step { ALL(j) { sent[AT(j, n)] = sent[AT(j, n)] | UNDO } }
          if :: n < NC -> n++ :: else -> break fi
     fi
  od
}
#else
proctype controller(byte n) {
  byte j; bool ok;
  ask(PREPARE);
  if :: ok -> ask(COMMIT) :: else fi;
#ifndef NO_RENEW
  if :: ok -> ask(RENEW) :: else fi;
#endif
  d_step {
    if
    :: ok ->
         j = id_of[n - 1];
         assert(EVERY(exported, j) && !broken[j - 1]);    /* P1 */
         assert(published_by[j - 1] == 0);                /* P2 */
         published_by[j - 1] = n
    :: else
    fi
  }
  if :: ask(RESUME) :: true fi                                 /* or it dies */
}
#endif

init {
  byte j;
  atomic {
    for (j : 1 .. NC) { id_of[j - 1] = j }
    ALL(j) {
      run participant(j);
#ifndef NO_LEASE
      run lease(j);
#endif
#ifndef RECOVERY
      run rollout(j)
#endif
    }
#ifdef RECOVERY
    ALL(j) { sent[AT(j, 1)] = PREPARE | COMMIT | RESUME }
    run controller(2)
#else
    if :: id_of[1] = 1 :: true fi;
    run controller(1); run controller(2)
#endif
  }
}

#ifdef LIVENESS
ltl free { <> [] (episode[0] == RUNS) }
#endif
