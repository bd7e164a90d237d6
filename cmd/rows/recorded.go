package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"os"
	"strings"
	"sync"
)

// recorded is a drawn job, and what its program has held.
type recorded struct {
	Seed    uint64  `json:"seed"`
	Number  uint64  `json:"number"`
	Job     row     `json:"job"`
	Program figures `json:"program,omitempty"`
	Failed  string  `json:"failed,omitempty"` // why the program had no plan
	// Unseen is what the planner said of the job when it was first held to the program.
	Unseen *scored `json:"unseen,omitempty"`
}

// scored is a plan of a job at a commit.
type scored struct {
	Commit string  `json:"commit"`
	Hand   figures `json:"hand,omitempty"`
	// Intervals are those of the peaks, by level.
	Intervals [2]bounds `json:"intervals"`
	Failed    string    `json:"failed,omitempty"`
}

// hash names a job by all that it is.
func (r row) hash() string {
	text, err := json.Marshal(r)
	if err != nil {
		log.Fatal(err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// readRecorded reads the lines of a file; there are none before the first is recorded.
func readRecorded(path string) (list []recorded, err error) {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line recorded
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", path, len(list)+1, err)
		}
		list = append(list, line)
	}
	return list, lines.Err()
}

// show prints drawn jobs and the planner's own figures.
func (c command) show(seed, count uint64) {
	for number := range count {
		r := draw(seed, number)
		if !c.chosen(r) {
			continue
		}
		hand, _, err := c.byHand(r)
		said := fmt.Sprintf("allocated %v, reserved %v", hand.peak(allocated), hand.peak(reserved))
		if err != nil {
			said = err.Error()
		}
		fmt.Printf("%d %s %s %d tokens: %s\n", number, r.Name, r.Model, r.Sequence, said)
	}
}

// record runs the programs of drawn jobs that were not run before, and adds them to a file one by one.
func (c command) record(path string, seed, count uint64, parallel int) {
	done, err := readRecorded(path)
	if err != nil {
		log.Fatal(err)
	}
	known := map[string]bool{}
	for _, line := range done {
		known[line.Job.hash()], known[fmt.Sprint(line.Seed, "/", line.Number)] = true, true
	}
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		log.Fatal(err)
	}
	defer file.Close()
	slots, lock, all := make(chan bool, parallel), sync.Mutex{}, sync.WaitGroup{}
	for number := range count {
		r := draw(seed, number)
		if known[r.hash()] || known[fmt.Sprint(seed, "/", number)] || !c.chosen(r) {
			continue
		}
		known[r.hash()] = true
		slots <- true
		all.Go(func() {
			defer func() { <-slots }()
			line := recorded{Seed: seed, Number: number, Job: r}
			if line.Program, err = c.byProgram(r); err != nil {
				line.Failed = strings.ToValidUTF8(err.Error(), "")
			}
			lock.Lock()
			defer lock.Unlock()
			text, err := json.Marshal(line)
			if err == nil {
				_, err = file.Write(append(text, '\n'))
			}
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(number, r.Name, r.Model, line.Failed)
		})
	}
	all.Wait()
}
