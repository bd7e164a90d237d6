package main

import (
	"bytes"
	"encoding/binary"
	"encoding/csv"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"plimsoll/internal/base/torchtest"
	"plimsoll/internal/state/optim/kernel"
)

// sharedFile returns a file with parameters and gradients.
func sharedFile(t *testing.T, numbers ...float32) string {
	path := filepath.Join(t.TempDir(), "shared")
	data, err := binary.Append(nil, binary.LittleEndian, numbers)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestStepUpdatesTheFile(t *testing.T) {
	for _, moments := range kernel.MomentNames() {
		for _, masters := range mastersNames() {
			testStep(t, moments, masters)
		}
	}
}

func testStep(t *testing.T, moments, masters string) {
	path := sharedFile(t, 1, 2, 3, 0.5, -0.5, 0)
	var out bytes.Buffer
	if err := run([]string{"-moments", moments, "-masters", masters, "-weight-decay", "0", path},
		strings.NewReader("step 0.25\nstep 0.125\n"), &out); err != nil {
		t.Fatal(err)
	}
	if out.String() != "ok\nok\n" {
		t.Errorf("answers %q", out.String())
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]float32, 6)
	if _, err := binary.Decode(data, binary.LittleEndian, got); err != nil {
		t.Fatal(err)
	}
	// With the same gradient again, Adam moves by the learning rate.
	for i, want := range []float64{1 - 0.375, 2 + 0.375, 3, 0.5, -0.5, 0} {
		if math.Abs(float64(got[i])-want) > 1e-3+math.Abs(want)/256 {
			t.Errorf("%s moments, %s masters: number %d is %g, expected %g", moments, masters, i, got[i], want)
		}
	}
}

func TestStepRefuses(t *testing.T) {
	infinity := float32(math.Inf(1))
	for _, c := range []struct {
		name, message, in string
		args              []string
	}{
		{"no file", "expected one file", "", nil},
		{"a file that is not there", "no such file", "", []string{filepath.Join(t.TempDir(), "none")}},
		{"an empty file", "has 0 bytes", "", []string{sharedFile(t)}},
		{"half a pair", "has 12 bytes", "", []string{sharedFile(t, 1, 2, 3)}},
		{"unknown moments", `moments are "fp7": expected fp32, bf16 or int8`, "", []string{"-moments", "fp7", sharedFile(t, 1, 2)}},
		{"unknown masters", `masters are "fp8"`, "", []string{"-masters", "fp8", sharedFile(t, 1, 2)}},
		{"another command", `"stop": expected step`, "stop\n", []string{sharedFile(t, 1, 2)}},
		{"no learning rate", "expected step and a learning rate", "step x\n", []string{sharedFile(t, 1, 2)}},
		{"a bad learning rate", "learning rate is -1", "step -1\n", []string{sharedFile(t, 1, 2)}},
		{"an infinite gradient", "infinite", "step 1\n", []string{sharedFile(t, 1, infinity)}},
	} {
		var out bytes.Buffer
		err := run(c.args, strings.NewReader(c.in), &out)
		if err == nil || !strings.Contains(err.Error(), c.message) || out.Len() != 0 {
			t.Errorf("%s: %v, expected %q; answered %q", c.name, err, c.message, out.String())
		}
	}
}

// TestLossesTrackTorch trains for some steps with torch.optim.AdamW and with each type of moments. Rounding moves a
// loss of about 2 by some 1e-6 with fp32, 3e-5 with bf16 and 1e-3 with int8 moments. The bounds leave room for
// another processor's arithmetic. A wrong step is far outside.
func TestLossesTrackTorch(t *testing.T) {
	if testing.Short() {
		t.Skip("trains a model")
	}
	bounds := map[string]float64{"fp32": 2e-5, "bf16": 5e-4, "int8": 5e-3}
	python, folder := torchtest.Python(t), t.TempDir()
	command, output := filepath.Join(folder, "step"), filepath.Join(folder, "losses.csv")
	if out, err := exec.Command("go", "build", "-o", command, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	const steps = 30
	training := exec.Command(python, filepath.Join("..", "train.py"),
		"--optimizers", "torch,fp32,bf16,int8", "--seeds", "1", "--steps", strconv.Itoa(steps), "--step-command",
		command, "--output", output)
	if out, err := training.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	losses := readLosses(t, output)
	torch := losses["torch"]
	if len(torch) != steps || torch[steps-1] > torch[0]-1 {
		t.Fatalf("torch's losses are %v: expected %d that fall by 1", torch, steps)
	}
	for moments, bound := range bounds {
		worst := 0.0
		for step, loss := range losses[moments] {
			worst = max(worst, math.Abs(loss-torch[step]))
		}
		if len(losses[moments]) != steps || !(worst <= bound) {
			t.Errorf("%s moments: %d losses, up to %g from torch's; expected %d within %g", moments,
				len(losses[moments]), worst, steps, bound)
		}
		t.Logf("%s moments: losses are within %.1e of torch's", moments, worst)
	}
}

// readLosses returns the training losses of each optimizer, by step.
func readLosses(t *testing.T, path string) map[string][]float64 {
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rows, err := csv.NewReader(file).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	losses := map[string][]float64{}
	for _, row := range rows[1:] {
		loss, err := strconv.ParseFloat(row[3], 64)
		if err != nil {
			t.Fatal(err)
		}
		losses[row[0]] = append(losses[row[0]], loss)
	}
	return losses
}
