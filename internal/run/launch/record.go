//go:build linux

package launch

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/probe"
	"plimsoll/internal/run/watch"
)

// marksSocket is the name of the socket of marks in the directory of the job's sockets.
const marksSocket = "marks"

// record begins to record the job. It returns the variables that tell the ranks where to send marks.
func (j *Job) record(directory string) (variables []string) {
	c := j.Recording
	c.Logf = j.Logf
	c.Start.Job, c.Start.Command, c.Start.Limits = j.name(directory), j.Command, watch.OwnLimits()
	c.Start.WorkingDirectory, _ = os.Getwd()
	for _, rank := range j.Ranks {
		c.Start.Ranks = append(c.Start.Ranks, samples.BoundRank{Rank: rank.Number, CPUs: rank.CPUs.String(),
			MemoryPolicy: rank.MemoryPolicy, NUMANodes: rank.NUMANodes})
	}
	j.recorder = watch.Begin(c)
	j.recorder.Started(root(os.Getpid(), samples.NoRank, samples.Keeper))
	j.marks = filepath.Join(directory, marksSocket)
	variables = []string{watch.MarksVariable + "=" + j.marks}
	if c.Snapshots != "" {
		variables = append(variables, samples.SnapshotsVariable+"="+c.Snapshots)
	}
	return variables
}

// listenToMarks begins to take the marks of the ranks. The keeper must know the job before: it removes the directory of
// the socket if the guard is killed.
func (j *Job) listenToMarks() {
	marks, err := watch.ListenToMarks(j.marks)
	if err != nil {
		j.Logf("ranks cannot send marks: %v; the phases of the recording are those of their output", err)
		return
	}
	go j.recorder.ReceiveMarks(marks)
}

// name returns the name of the job.
func (j *Job) name(directory string) string {
	for _, variable := range j.Ranks[0].Environment {
		if name, found := strings.CutPrefix(variable, watch.JobVariable+"="); found {
			return name
		}
	}
	return filepath.Base(directory)
}

// Recorded returns what the guard has recorded: nothing of a job that has not begun.
func (j *Job) Recorded() []samples.Record {
	if j.recorder == nil {
		return nil
	}
	return j.recorder.Recording()
}

func root(pid, rank int, role samples.Role) probe.Root {
	return probe.Root{Identity: probe.Identity{PID: pid}, Rank: rank, Role: role}
}

// receive records what the keeper tells, and returns its answer. It calls heeds once the keeper handles signals.
func (j *Job) receive(messages io.Reader, heeds func()) answer {
	for decoder := json.NewDecoder(messages); ; {
		var m message
		if err := decoder.Decode(&m); err != nil {
			return answer{Failed: "it ended without a result"}
		}
		switch {
		case m.Heeds:
			heeds()
		case m.Started != nil && m.Started.Rank == samples.NoRank:
			j.recorder.Started(root(m.Started.PID, samples.NoRank, samples.Service))
		case m.Started != nil:
			j.recorder.Started(root(m.Started.PID, m.Started.Rank, samples.RankProcess))
		case m.Printed != nil:
			j.recorder.Printed(m.Printed.Rank, m.Printed.Stream, m.Printed.Skipped, m.Printed.Text)
		case m.Ended != nil:
			j.recorder.Ended(m.Ended.RankEnd, m.Ended.At)
		case m.Answer != nil:
			return *m.Answer
		}
	}
}

// recordKilledRanks records the ends of ranks that the kernel has killed with the keeper.
func (j *Job) recordKilledRanks() {
	for _, root := range j.recorder.Running() {
		j.recorder.Ended(samples.RankEnd{Rank: root.Rank, PID: root.PID, Signal: int(syscall.SIGKILL), Asked: true},
			time.Now())
	}
}

// endRecord ends the recording.
func (j *Job) endRecord(result *Result, err error) {
	e := samples.End{ExitCode: 1}
	var notStarted *NotStarted
	switch {
	case result != nil:
		e.ExitCode, e.ByUser = result.ExitCode, result.ByUser
	case errors.As(err, &notStarted):
		e.ExitCode = notStarted.ExitCode
	}
	j.recorder.End(e)
}
