//go:build linux

package launch

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"

	"plimsoll/internal/base/files"
)

// For want of memory the kernel kills the process with the highest score:
//
//	resident memory + swap + page tables + oom_score_adj/1000 of all memory
//
// All memory is the limit that was reached, or the memory of the host. The full
// optimizer state is resident memory of the service. Killing the service frees nothing,
// as the keeper has the same files; yet the rank that took too much may be small beside
// it. So the ranks get the full range more than the guard, and the kernel prefers them
// whatever the size of the state. Keeper and service get one more than the guard, which
// must survive to explain the kill.
const (
	scoreFile  = "/proc/self/oom_score_adj"
	scoreRange = 1000 // of oom_score_adj on both sides of 0; -1000 is never killed
)

// scores are the values of oom_score_adj of a job's processes.
type scores struct {
	Keeper int // and of the service
	Ranks  int
}

// lowerScore makes the kernel prefer to kill other processes, if this process may do
// that (CAP_SYS_RESOURCE). It returns the score that this process has then.
func lowerScore(by int) int {
	setScore(max(score()-by, -by))
	return score()
}

// jobScores returns the scores of a job, given the guard's score.
func jobScores(guard int) scores {
	return scores{Keeper: min(guard+1, scoreRange), Ranks: min(guard+scoreRange, scoreRange)}
}

// SpareService makes the kernel prefer to kill processes other than this one and the
// optimizer service that it starts, if this process may do that. Both can still be
// killed: if the state itself is too large, nothing else would free memory.
func SpareService() { lowerScore(scoreRange - 1) }

func score() int {
	text, _ := files.ReadKernel(scoreFile)
	score, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return score
}

// setScore sets the score of this process. If that is not allowed, or there is no such
// file, the score stays as it is.
func setScore(score int) { _ = os.WriteFile(scoreFile, []byte(strconv.Itoa(score)), 0) }

// scoreLock is held while this process has the score of a process that it starts.
var scoreLock sync.Mutex

// startWithScore starts a process that has a score from its first instruction on. The
// process inherits the score, so that the processes that it starts have it, too.
func startWithScore(command *exec.Cmd, wanted int) error {
	scoreLock.Lock()
	defer scoreLock.Unlock()
	defer setScore(score())
	setScore(wanted)
	return command.Start()
}
