//go:build linux

package ghost

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"plimsoll/internal/after/snapshot"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/simulate"
)

// hostPart is what the process of a rank held in a part of the record.
type hostPart struct {
	// Held is what stacks of Python hold in large blocks when they are most, as if each were written.
	Held []struct {
		Stack    int          `json:"stack"` // in Record.HostStacks
		Pageable ledger.Bytes `json:"pageable_bytes"`
		Pinned   ledger.Bytes `json:"pinned_bytes"`
		Managed  ledger.Bytes `json:"managed_bytes"` // that the driver moves between the host and a device
	} `json:"held"`
	Process  ledger.Bytes `json:"process_bytes"` // that is resident beside them
	Children ledger.Bytes `json:"children_bytes"`
}

// hostPhase is what the process of a rank holds in a phase.
type hostPhase struct {
	name      ledger.PhaseName
	iteration ledger.Iteration
	holdings  []ledger.Holding
}

func (p hostPhase) bytes() (sum ledger.Bytes) {
	for _, h := range p.holdings {
		sum += h.Bytes
	}
	return sum
}

// inPhase returns what this rank holds in the phase of another.
func (r *Record) inPhase(p hostPhase) []ledger.Holding {
	for _, own := range r.Host {
		if own.name == p.name && own.iteration == p.iteration {
			return own.holdings
		}
	}
	return nil
}

// accounts says of stacks what they made, and where.
func (r *Record) accounts() ([]snapshot.Account, error) {
	stacks := make([][]snapshot.Line, len(r.HostStacks))
	for i, frames := range r.HostStacks {
		for _, f := range frames {
			line, err := strconv.Atoi(f[2])
			if err != nil {
				return nil, spoilt("host_stacks[%d] has a line %q", i, f[2])
			}
			stacks[i] = append(stacks[i], snapshot.Line{File: f[0], Function: f[1], Number: line})
		}
	}
	accounts := snapshot.Accounts(stacks)
	for _, i := range r.HostStates {
		if accounts[i].Component == ledger.Unattributed {
			accounts[i].Component = ledger.OptimizerStates
		}
	}
	return accounts, nil
}

// accountHost makes the phases of the host. Of the parts of a phase, the one that held most stands for it.
func (r *Record) accountHost(accounts []snapshot.Account) {
	var managed ledger.Bytes
	for i, part := range r.Phases {
		name, iteration := r.named(i)
		next := hostPhase{name, iteration, part.Host.holdings(accounts)}
		at := slices.IndexFunc(r.Host, func(p hostPhase) bool { return p.name == name && p.iteration == iteration })
		switch {
		case at < 0:
			r.Host = append(r.Host, next)
		case next.bytes() > r.Host[at].bytes():
			r.Host[at] = next
		}
		var sum ledger.Bytes
		for _, h := range part.Host.Held {
			sum += h.Managed
		}
		managed = max(managed, sum)
	}
	if managed > 0 {
		r.Notes = append(r.Notes, Note{"managed", fmt.Sprintf("%v of managed memory are counted on the host, which "+
			"must have room for them: the driver keeps them on the GPU while that has room, and then as much more "+
			"is in use there", managed)})
	}
}

// inManaged returns the component of managed memory.
func inManaged(c ledger.Component) ledger.Component {
	if c == ledger.OptimizerStates {
		return ledger.ManagedOptimizerStates
	}
	return ledger.ManagedMemory
}

// holdings returns what a part of the record holds, by component: the line that holds most of each stands for it.
func (p *hostPart) holdings(accounts []snapshot.Account) []ledger.Holding {
	type line struct {
		component ledger.Component
		place     string
	}
	lines, pinned := map[line]ledger.Bytes{}, map[ledger.Component]ledger.Bytes{}
	for _, held := range p.Held {
		a := accounts[held.Stack]
		if held.Managed > 0 {
			lines[line{inManaged(a.Component), a.Place}] += held.Managed
		}
		if held.Pageable+held.Pinned == 0 {
			continue
		}
		lines[line{a.Component, a.Place}] += held.Pageable + held.Pinned
		pinned[a.Component] += held.Pinned
	}
	keys := make([]line, 0, len(lines))
	for l := range lines {
		keys = append(keys, l)
	}
	slices.SortFunc(keys, func(a, b line) int {
		return cmp.Or(cmp.Compare(lines[b], lines[a]), cmp.Compare(a.component, b.component),
			cmp.Compare(a.place, b.place))
	})
	all := []ledger.Holding{simulate.Process(p.Process)}
	if p.Children > 0 {
		all = append(all, ledger.Holding{Component: ledger.ChildProcesses, Bytes: p.Children,
			Why: "processes that the program started, such as workers of a DataLoader, as they are here"})
	}
	at := map[ledger.Component]int{}
	for _, l := range keys {
		if i, known := at[l.component]; known {
			all[i].Bytes += lines[l]
			continue
		}
		at[l.component] = len(all)
		all = append(all, ledger.Holding{Component: l.component, Bytes: lines[l],
			Why: fmt.Sprintf("%s (%v)", l.place, lines[l])})
	}
	for component, bytes := range pinned {
		if bytes > 0 {
			all[at[component]].Why += fmt.Sprintf("; %v are pinned", bytes)
		}
	}
	return all
}
