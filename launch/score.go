package launch

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"

	"plimsoll/files"
)

// For want of memory the kernel kills the process with the highest score:
//
//	resident memory + swap + page tables + oom_score_adj/1000 of all memory
//
// where all is what the limit allows that was reached, or the host has. The
// whole optimizer state is resident memory of the service. Killing that frees
// nothing, for the keeper has the same files, while the rank that has taken too
// much may be small beside it. So the ranks get all of the range more than the
// guard: then they are preferred, whatever part of the memory the state is.
// Keeper and service get one more than the guard, which is to explain it.
const (
	scoreFile  = "/proc/self/oom_score_adj"
	scoreRange = 1000 // of oom_score_adj on both sides of 0; -1000 is never killed
)

// scores are the values of oom_score_adj of a job.
type scores struct {
	Keeper int // and the service
	Ranks  int
}

// lowerScore has the kernel prefer to kill other processes, where this process
// may do that (CAP_SYS_RESOURCE), and says what it has then.
func lowerScore(by int) int {
	setScore(max(score()-by, -by))
	return score()
}

// jobScores are those of a job whose guard has this one.
func jobScores(guard int) scores {
	return scores{Keeper: min(guard+1, scoreRange), Ranks: min(guard+scoreRange, scoreRange)}
}

// SpareService has the kernel prefer to kill others than this process and the
// optimizer service that it starts, where it may. Both can still be killed: if
// the state itself is too large, nothing else would free it.
func SpareService() { lowerScore(scoreRange - 1) }

func score() int {
	text, _ := files.ReadKernel(scoreFile)
	score, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return score
}

// setScore fails where it is not allowed or there is no such file; then things
// are as the kernel has them.
func setScore(score int) { _ = os.WriteFile(scoreFile, []byte(strconv.Itoa(score)), 0) }

// scoreLock is held while this process has the score of one that it starts.
var scoreLock sync.Mutex

// startWithScore starts a process that has this score from its first instruction
// on. It inherits it: what it starts must not be missed.
func startWithScore(command *exec.Cmd, wanted int) error {
	scoreLock.Lock()
	defer scoreLock.Unlock()
	defer setScore(score())
	setScore(wanted)
	return command.Start()
}
