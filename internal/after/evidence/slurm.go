package evidence

import (
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// slurmPatterns are the accounts of Slurm's commands.
var slurmPatterns = []pattern{
	{ // sacct, in columns or --parsable
		name:       "sacct",
		literals:   []string{"JobID"},
		expression: `^\s*JobID(?:Raw)?(?:\||\s).*State`,
		kind:       Slurm,
		take:       func(r *reader, m *match) { r.begin(m.stream, newAccountTable(m.whole)) },
	},
	{ // scontrol show job
		name:       "scontrol: state",
		literals:   []string{"JobState="},
		expression: `\bJobState=(?P<state>[A-Z_]+)`,
		kind:       Slurm, fact: accountFact,
	},
	{ // Slurm: src/slurmctld/agent.c, the subject of a mail
		name:     "Slurm: mail",
		literals: []string{"Slurm Job_id="},
		expression: `\bSlurm Job_id=\d+ .*, (?P<state>OUT_OF_MEMORY|TIMEOUT|DEADLINE|NODE_FAIL|PREEMPTED|CANCELLED|` +
			`FAILED|COMPLETED)(?:, ExitCode (?P<exit>\d+))?`,
		kind: Slurm, fact: accountFact,
	},
	{ // squeue
		name:       "squeue: out of memory",
		literals:   []string{" OOM "},
		expression: `^\s*(?P<what>\d+(?:_\d+)?)\s.* OOM +(?:\d+-)?\d+(?::\d\d)+ `,
		kind:       Slurm, fact: batchKill("Slurm"),
	},
	{ // seff
		name:       "seff: state",
		literals:   []string{" (exit code "},
		expression: `^State: (?P<state>[A-Z_]+) \(exit code (?P<exit>\d+)\)`,
		kind:       Slurm, fact: accountFact,
	},
	{ // scontrol show job
		name:       "scontrol: exit code",
		literals:   []string{"ExitCode="},
		expression: `\bExitCode=(?P<exit>\d+:\d+)`,
		kind:       Slurm, fact: accountFact,
	},
	{ // scontrol show job
		name:       "scontrol: memory",
		literals:   []string{"TRES="},
		expression: `\b(?:Req|Alloc)?TRES=\S*\bmem=(?P<mem>[\d.]+[KMGTP]?)`,
		kind:       Slurm,
		fact:       func(m *match) Fact { return Limit{Name: "memory.max", Group: "the job", Bytes: m.size("mem", 1)} },
	},
}

// accountFact is for lines with one of the groups state and exit.
func accountFact(m *match) Fact {
	for _, fact := range (account{state: m.get("state"), exit: m.get("exit")}).facts() {
		return fact
	}
	return nil
}

// account is what Slurm's accounting says of a job or a step.
type account struct {
	job, state, exit   string
	requested, highest Size // memory
}

// facts returns what the account says.
func (a account) facts() (facts []Fact) {
	code, signal, _ := strings.Cut(a.exit, ":")
	state, _, _ := strings.Cut(a.state, " ")
	state = strings.TrimSuffix(state, "+") // sacct cuts it at ten characters
	is := func(name string) bool { return len(state) >= 6 && strings.HasPrefix(name, state) }
	switch {
	case is("OUT_OF_MEMORY"), a.exit == "0:125":
		facts = append(facts, BatchKill{By: "Slurm", What: a.job, Limit: a.requested})
	case is("TIMEOUT"), is("DEADLINE"):
		facts = append(facts, BatchEnd{By: "Slurm", Reason: "time limit"})
	case is("CANCELLED"):
		facts = append(facts, BatchEnd{By: "Slurm", Reason: "cancelled"})
	case is("PREEMPTED"):
		facts = append(facts, BatchEnd{By: "Slurm", Reason: "preempted"})
	case is("NODE_FAIL"), is("BOOT_FAIL"):
		facts = append(facts, BatchEnd{By: "Slurm", Reason: "node failure"})
	case a.exit != "" && !is("RUNNING") && !is("PENDING"):
		facts = append(facts, ProcessEnded{
			By: "Slurm", Rank: NoRank, LocalRank: NoRank, ExitCode: atoi(code), Signal: atoi(signal),
		})
	}
	values := map[string]int64{}
	if a.requested.Known {
		values["ReqMem"] = int64(a.requested.Bytes)
	}
	if a.highest.Known {
		values["MaxRSS"] = int64(a.highest.Bytes)
	}
	if len(values) > 0 {
		facts = append(facts, Counters{Group: a.job, File: "sacct", Values: values})
	}
	return facts
}

// accountTable is what sacct prints.
type accountTable struct {
	columns   []string
	widths    []int // of the columns; empty with separators
	separator bool
}

func newAccountTable(header string) *accountTable {
	b := &accountTable{separator: strings.Contains(header, "|")}
	if b.separator {
		b.columns = strings.Split(header, "|")
	} else {
		b.columns = strings.Fields(header)
	}
	return b
}

var dashes = lazyregexp.New(`^[- ]*---[- ]*$`)

func (b *accountTable) line(r *reader, t *text) bool {
	if !b.separator && dashes.MatchString(t.string) {
		for _, field := range strings.Fields(t.string) {
			b.widths = append(b.widths, len(field))
		}
		return len(b.widths) == len(b.columns)
	}
	values := b.split(t.string)
	if values == nil {
		return false
	}
	a := account{}
	for i, column := range b.columns {
		switch value := strings.TrimSpace(values[i]); strings.TrimSpace(column) {
		case "JobID":
			a.job = value
		case "State":
			a.state = value
		case "ExitCode":
			a.exit = value
		case "ReqMem": // older releases add n for a node and c for a core
			a.requested = sizeOf(strings.TrimRight(value, "nc"), 1)
		case "MaxRSS":
			a.highest = sizeOf(value, 1)
		}
	}
	r.kinds[Slurm]++
	for _, fact := range a.facts() {
		r.add(t, fact)
	}
	return true
}

// split returns the values of a row, or nil if the line is no row.
func (b *accountTable) split(line string) []string {
	if b.separator {
		values := strings.Split(line, "|")
		if len(values) != len(b.columns) {
			return nil
		}
		return values
	}
	if len(b.widths) != len(b.columns) || line == "" || line[0] < '0' || line[0] > '9' {
		return nil
	}
	values, at := make([]string, len(b.columns)), 0
	for i, width := range b.widths {
		values[i] = line[min(at, len(line)):min(at+width, len(line))]
		at += width + 1
	}
	return values
}

func (*accountTable) end(*reader) {}
