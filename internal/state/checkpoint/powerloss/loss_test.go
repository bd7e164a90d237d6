//go:build linux

package powerloss

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Data reach the disk page by page, and the disk writes sectors.
const (
	page   = 4096
	sector = 512
)

// remains is what a loss of power leaves.
type remains struct {
	files   map[int][]byte
	folders map[int]map[string]int
}

// lose returns what is left of a log whose last operation was the last before a loss of power.
func lose(log []operation, random *rand.Rand) remains {
	kept := keptNames(log, random)
	synced := map[int]int{}
	for i, o := range log {
		if o.kind == syncData {
			synced[o.id] = i
		}
	}
	r := remains{files: map[int][]byte{}, folders: map[int]map[string]int{top: {}}}
	for i, o := range log {
		isSafe := i < synced[o.id]
		switch o.kind {
		case makeName:
			if o.isFolder {
				r.folders[o.made] = map[string]int{}
			} else {
				r.files[o.made] = nil
			}
			if i < kept[o.id] {
				r.folders[o.id][o.name] = o.made
			}
		case removeName, changeName, exchangeNames:
			if i < kept[o.id] {
				r.rename(o)
			}
		case write:
			r.write(o, isSafe, random)
		case cut:
			if isSafe || random.IntN(2) == 0 {
				r.resize(o.id, o.offset)
			}
		case lengthen:
			if isSafe || random.IntN(2) == 0 {
				r.resize(o.id, max(o.offset, int64(len(r.files[o.id]))))
			}
		}
	}
	return r
}

// keptNames returns, for each folder, up to which operation its names have reached the disk: at least those before the
// last sync.
func keptNames(log []operation, random *rand.Rand) map[int]int {
	open := map[int][]int{} // operations since the last sync
	kept := map[int]int{}
	for i, o := range log {
		switch o.kind {
		case makeName, removeName, changeName, exchangeNames:
			open[o.id] = append(open[o.id], i)
		case syncNames:
			kept[o.id], open[o.id] = i, nil
		}
	}
	for _, folder := range slices.Sorted(maps.Keys(open)) {
		if n := random.IntN(len(open[folder]) + 1); n > 0 {
			kept[folder] = open[folder][n-1] + 1
		}
	}
	return kept
}

func (r remains) rename(o operation) {
	names := r.folders[o.id]
	switch o.kind {
	case removeName:
		delete(names, o.name)
	case changeName:
		names[o.to] = names[o.name]
		delete(names, o.name)
	case exchangeNames:
		names[o.name], names[o.to] = names[o.to], names[o.name]
	}
}

// write writes what has reached the disk: all, or some pages, of which one may be torn.
func (r remains) write(o operation, isSafe bool, random *rand.Rand) {
	for at := 0; at < len(o.data); {
		next := min(len(o.data), at+page-int((o.offset+int64(at))%page))
		if part := o.data[at:next]; isSafe {
			r.put(o.id, o.offset+int64(at), part)
		} else if fate := random.IntN(8); fate < 4 {
			r.put(o.id, o.offset+int64(at), part)
		} else if fate == 4 && len(part) > sector {
			r.put(o.id, o.offset+int64(at), part[:random.IntN(len(part)/sector)*sector])
		}
		at = next
	}
}

func (r remains) put(id int, offset int64, data []byte) {
	if end := offset + int64(len(data)); end > int64(len(r.files[id])) {
		r.resize(id, end)
	}
	copy(r.files[id][offset:], data)
}

func (r remains) resize(id int, size int64) {
	old := r.files[id]
	r.files[id] = make([]byte, size)
	copy(r.files[id], old)
}

// layOut writes what is left into a folder.
func (r remains) layOut(t *testing.T, path string, id int) {
	t.Helper()
	for name, child := range r.folders[id] {
		path := filepath.Join(path, name)
		if data, isFile := r.files[child]; isFile {
			if err := os.WriteFile(path, data, 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		r.layOut(t, path, child)
	}
}

// only is the loss to look at, where there is one.
var only = flag.String("loss", "", "the only loss of power to look at, such as 120-3")

// often is how many times power is lost after each operation.
func often() int {
	if testing.Short() {
		return 2
	}
	return 20
}

// eachLoss loses power after every operation of a log from one on, several times, and has a function look at what is
// left.
func eachLoss(t *testing.T, log []operation, first, times int, look func(t *testing.T, folder string, operations int)) {
	t.Helper()
	losses := 0
	for operations := first; operations <= len(log); operations++ {
		for time := range times {
			name := fmt.Sprintf("%d-%d", operations, time)
			if *only != "" && *only != name {
				continue
			}
			losses++
			t.Run(name, func(t *testing.T) {
				folder := t.TempDir()
				random := rand.New(rand.NewPCG(uint64(operations), uint64(time)))
				lose(log[:operations], random).layOut(t, folder, top)
				defer tell(t, log[:operations], name)
				look(t, folder, operations)
			})
			if t.Failed() {
				return
			}
		}
	}
	t.Logf("%d operations, %d losses of power", len(log)-first, losses)
}

// tell tells of the operations before a loss of power that has done harm.
func tell(t *testing.T, log []operation, name string) {
	if !t.Failed() {
		return
	}
	t.Logf("again: go test -run '^%s$' -loss %s", strings.TrimSuffix(t.Name(), "/"+name), name)
	for i, o := range log {
		if left := len(log) - i; left <= mostTold {
			t.Logf("operation %d: %v", i, o)
		}
	}
}

const mostTold = 30
