//go:build linux

package ghost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/go-json-experiment/json"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

// mailbox is where ranks that are played leave what they send each other. A stage of a pipeline waits for sizes that
// the stage before it sends. Once all ranks that are played wait, those that they wait for are played, too.
type mailbox struct {
	folder string

	mutex   sync.Mutex
	running map[string]bool
	isFull  bool          // this host has no memory for another rank
	played  map[int]error // ranks that were played for what they send, and how they ended
	group   sync.WaitGroup
}

// mostPeers is how many ranks are played for what they send.
const mostPeers = 14

const waiting = ".waits" // the end of the name of a file in which a rank says what it waits for

// wait is what a rank waits for.
type wait struct {
	Rank    int    `json:"rank"`    // that sends it
	Message string `json:"message"` // the file of it
	Needed  bool   `json:"needed"`  // else the program can go on without it
}

func newMailbox(names ...string) (*mailbox, error) {
	folder, err := os.MkdirTemp("", "plimsoll-ghost-mailbox-")
	p := &mailbox{folder: folder, running: map[string]bool{}, played: map[int]error{}}
	for _, name := range names {
		p.running[name] = true
	}
	return p, err
}

func (p *mailbox) close() {
	p.group.Wait()
	_ = os.RemoveAll(p.folder)
}

// began says that a rank may send something.
func (p *mailbox) began(name string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.running[name] = true
}

// ended says that a rank will send nothing more.
func (p *mailbox) ended(name string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	delete(p.running, name)
	_ = os.Remove(filepath.Join(p.folder, name+waiting))
}

// serve plays ranks that others wait for, until the context ends.
func (p *mailbox) serve(ctx context.Context, r Request) {
	p.group.Go(func() {
		look := time.NewTicker(20 * time.Millisecond)
		defer look.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-look.C:
			}
			p.mutex.Lock()
			p.isFull = !r.host.hasRoom()
			for _, rank := range p.next(p.waits()) {
				p.play(ctx, r, rank)
			}
			p.mutex.Unlock()
		}
	})
}

// waits returns what the ranks wait for that are played, if all of them wait.
func (p *mailbox) waits() []wait {
	var all []wait
	for name := range p.running {
		text, err := files.Read(filepath.Join(p.folder, name+waiting), 1<<10)
		if err != nil {
			return nil // it does not wait
		}
		var w wait
		if json.Unmarshal(text, &w) != nil || !messageName.MatchString(w.Message) {
			return nil
		}
		for _, there := range []string{"", ".none"} {
			if _, err := os.Stat(filepath.Join(p.folder, w.Message+there)); err == nil {
				return nil // it has what it waits for
			}
		}
		all = append(all, w)
	}
	return all
}

var messageName = regexp.MustCompile(`^[0-9a-f]{32}$`)

// next returns the ranks to play when all others wait. Where there are none, those that need not wait go on, and else
// all are refused.
func (p *mailbox) next(all []wait) (ranks []int) {
	isNeeded := func(w wait) bool { return w.Needed }
	for _, w := range all {
		if _, known := p.played[w.Rank]; w.Needed && !known && !p.isFull && len(p.played) < mostPeers {
			p.played[w.Rank] = nil
			ranks = append(ranks, w.Rank)
		}
	}
	if len(ranks) > 0 {
		return ranks
	}
	optional := slices.DeleteFunc(slices.Clone(all), isNeeded)
	if len(optional) > 0 {
		all = optional
	}
	for _, w := range all {
		p.refuse(w, p.why(w))
	}
	return nil
}

// why says why nobody sends what a rank waits for.
func (p *mailbox) why(w wait) string {
	switch err, known := p.played[w.Rank]; {
	case err != nil:
		return fmt.Sprintf("it was played, and ended: %v", err)
	case known || !w.Needed:
		return "it waits, too"
	}
	if p.isFull {
		return "this host has no memory to play it"
	}
	return fmt.Sprintf("more than %d ranks wait for each other", mostPeers)
}

// refuse tells a rank that it waits in vain.
func (p *mailbox) refuse(w wait, why string) {
	path := filepath.Join(p.folder, w.Message+".none")
	if os.WriteFile(path+".part", []byte(why), 0o600) == nil {
		_ = os.Rename(path+".part", path)
	}
}

// play plays a rank for what it sends. It needs no plan, so its GPU has no limit.
func (p *mailbox) play(ctx context.Context, r Request, rank int) {
	r.name = fmt.Sprintf("rank-%d", rank)
	r.Rank, r.Output, r.WhatIf, r.Keep, r.GPU.Memory = rank, io.Discard, nil, nil, 0
	p.running[r.name] = true
	p.group.Go(func() {
		defer p.ended(r.name)
		record, err := r.Run(ctx)
		if err == nil && record.End.Kind == "failed" {
			err = fault.Inputf("%s", record.End.Message)
		}
		if err == nil {
			err = errors.New("it sent nothing")
		}
		p.mutex.Lock()
		defer p.mutex.Unlock()
		p.played[rank] = err
	})
}

// notes says that ranks were played for what they send.
func (p *mailbox) notes() []Note {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if len(p.played) == 0 {
		return nil
	}
	return []Note{{"ranks", fmt.Sprintf("beside the ranks of the plan, %d more ran for what these receive: sizes, "+
		"for one", len(p.played))}}
}
