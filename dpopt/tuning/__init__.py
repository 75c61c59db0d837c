"""Tuning that is paid for: many private runs with different settings, of which only the best is released.

Trying settings on private data and keeping the best is a release of its own: of k runs, what is best says something of
all k. Composed, they cost nearly k^(1/2) times as much as one. Selecting among a *random* number of runs costs about
two or three times one run's epsilon however many there are (Liu and Talwar 2019; Papernot and Steinke 2022), if

* every trial costs at most the event that is stated for it, its score included;
* how many trials there are, and with which settings, depends on no private data;
* nothing but the best trial is released: no other's score, curve or parameters, nor how many there were.

The second is drawn here. The first is checked where a trial says what it spent. The third is the caller's as well: do
not print from a trial, write to a tracker from it, or time it in public.
"""

from dpopt.tuning.num_trials import NumTrials as NumTrials
from dpopt.tuning.scores import PrivateScore as PrivateScore
from dpopt.tuning.scores import PublicScore as PublicScore
from dpopt.tuning.selection import Selection as Selection
from dpopt.tuning.selection import calibrate as calibrate
from dpopt.tuning.selection import repeat_and_select as repeat_and_select
