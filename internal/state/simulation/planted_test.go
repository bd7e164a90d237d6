//go:build linux

package simulation

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// planted is a fault that is put into the code on purpose.
type planted struct {
	name, file string
	was, is    string
	test       string
	schedules  string // in which it must be found
}

var plantedFaults = []planted{
	{"the index is written before the chunks are on the disk", "tier/tier.go",
		"if err := s.Sync(); err != nil {\n\t\treturn err\n\t}\n\tnext", "next", "TestSchedules", "20000"},
	{"the journal forgets a chunk before it is in the files", "engine/tier.go",
		"if err := s.tier.store.Write(l.unit, tier.State,",
		"l.holds.Store(0)\n\tif err := s.tier.store.Write(l.unit, tier.State,", "TestSchedules", "20000"},
	{"what is read is not compared with its checksum", "tier/tier.go",
		"if entryOf(slot, p) != entry {", "if false {", "TestSchedules", "200000"},
	{"sums of the state are not verified", "engine/sums.go",
		"sum != 0 && sum != sums.Before[number]+written", "sum == 0 && sum != sums.Before[number]+written",
		"TestSchedules", "200000"},
	{"a write goes to the slot that the last commit uses", "tier/tier.go",
		"slot = 1 - slot\n", "_ = 1 - slot\n", "TestSchedules", "20000"},
	{"a chunk is marked before it is changed", "engine/update.go",
		"began := s.config.begin()\n\tswitch {", "s.setDone(unit)\n\tbegan := s.config.begin()\n\tswitch {",
		"TestSchedules", "20000"},
	{"an accumulation that is done is repeated", "engine/accumulate.go",
		"if s.isAdded(unit) {\n\t\treturn // another", "if false {\n\t\treturn // another", "TestSchedules", "200000"},
	{"a killed roll back is not finished", "engine/update.go",
		"if s.restoring.Load() {", "if false {", "TestSchedules", "200000"},
	{"a commit that is found need not be on the disk", "tier/open.go",
		"if err := s.settleIndex(disk); err != nil {", "if err := error(nil); err != nil {", "TestSchedules", "200000"},
	{"a step is finished without a chunk that could not be written", "engine/update.go",
		"if s.writeHeld(); s.Err() != nil {", "if s.writeHeld(); false {", "TestSchedules", "200000"},
	{"a step is made again when its answer was lost", "service/held_shard.go",
		"b.Step == uint64(last) && last > 0 {\n\t\treturn false, nil",
		"b.Step == uint64(last) && last > 0 {\n\t\tb.Step++", "TestServiceSchedules", "2000"},
	{"a service that starts again cannot go back", "service/tier.go",
		"return s.header.initialized() && s.shard", "return s.wasOnTier && s.shard", "TestServiceSchedules", "50000"},
	{"the state of a session that was restored counts as unwritten", "service/tier.go",
		"s.header.condition.Store(stateIsWhole)\n\ts.wasOnTier", "s.wasOnTier", "TestServiceSchedules", "2000"},
	{"a chunk that is kept is not compared with the files", "tier/tier.go",
		"case ok && entryOf(slot, p) == entry:", "case ok && slot >= 0:", "TestSchedules", "20000"},
}

var seedFound = regexp.MustCompile(`seed (\d+): (.*)`)

// TestPlantedFaultsAreFound plants each fault in a copy of its file. Some schedule finds it, and the seed that is
// printed finds it again.
func TestPlantedFaultsAreFound(t *testing.T) {
	if !*plantedFlag {
		t.Skip("compiles the engine once for each fault; -planted runs it")
	}
	for _, p := range plantedFaults {
		t.Run(strings.ReplaceAll(p.name, " ", "_"), func(t *testing.T) {
			binary := p.build(t)
			out, err := exec.Command(binary, "-test.run", "^"+p.test+"$", "-schedules", p.schedules, "-services",
				p.schedules).CombinedOutput()
			found := seedFound.FindSubmatch(out)
			if err == nil || found == nil {
				t.Fatalf("%s schedules have not found it: %v\n%.3000s", p.schedules, err, out)
			}
			out, err = exec.Command(binary, "-test.run", "^"+p.test+"$", "-seed", string(found[1])).CombinedOutput()
			if err == nil {
				t.Errorf("seed %s does not find it again:\n%.3000s", found[1], out)
			}
			t.Logf("seed %s: %.150s", found[1], found[2])
		})
	}
}

// build returns a test binary with the fault.
func (p planted) build(t *testing.T) string {
	folder := t.TempDir()
	path, err := filepath.Abs(filepath.Join("..", filepath.FromSlash(p.file)))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if count := strings.Count(string(text), p.was); count != 1 {
		t.Fatalf("%s has what the fault replaces %d times, expected once", p.file, count)
	}
	changed, binary := filepath.Join(folder, "changed.go"), filepath.Join(folder, "simulation.test")
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		changed: strings.Replace(string(text), p.was, p.is, 1), filepath.Join(folder, "overlay.json"): string(overlay),
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	command := exec.Command("go", "test", "-c", "-vet", "off", "-o", binary, "-overlay",
		filepath.Join(folder, "overlay.json"), ".")
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return binary
}
