package recipe

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files"
)

// TestReviseAssignment edits scripts with assignments of Hydra: only the value changes.
func TestReviseAssignment(t *testing.T) {
	const command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
	const key = "actor_rollout_ref.rollout.gpu_memory_utilization="
	for before, after := range map[string]string{
		command + " \\\n  " + key + "0.8 # most\n":           command + " \\\n  " + key + "0.5 # most\n",
		command + " '" + key + "0.8'\n":                      command + " '" + key + "0.5'\n",
		command + " +" + key + "0.8\n":                       command + " +" + key + "0.5\n",
		"# " + key + "0.8\n" + command + " " + key + "0.8\n": "# " + key + "0.8\n" + command + " " + key + "0.5\n",
		command + " \\\n  actor_rollout_ref.rollout.n=8\n": command + " \\\n  " + key + "0.5 \\\n    " +
			"actor_rollout_ref.rollout.n=8\n",
	} {
		s, err := LoadSettings("run.sh", files.Texts{"run.sh": []byte(before)})
		if err != nil || s == nil {
			t.Fatalf("%q: %v", before, err)
		}
		r, _, err := s.Revise(RolloutFraction, "fraction=0.5")
		if err != nil {
			t.Errorf("%q: %v", before, err)
		} else if string(r.Text) != after {
			t.Errorf("%q became\n%s, want\n%s", before, r.Text, after)
		}
	}
	// A key that a tilde deletes is not given, and one that is assigned again behind it is.
	for arguments, want := range map[string]string{" " + key + "0.8 ~" + strings.TrimSuffix(key, "="): "null",
		" ~" + key + "0.8 +" + key + "0.6": "0.6"} {
		d := parseCommand("run.sh", []byte(command+arguments+"\n"))
		if d == nil {
			t.Fatalf("%s: no document", arguments)
		}
		at := d.Root.Member("actor_rollout_ref").Value.Member("rollout").Value.Member("gpu_memory_utilization")
		if at == nil || at.Value.String() != want {
			t.Errorf("%s: the key is %v, want %s", arguments, at, want)
		}
	}
	// A variable that two assignments read cannot be edited for one of them.
	shared := "X=0.8\n" + command + " " + key + "$X data.val_files=$X\n"
	s, err := LoadSettings("run.sh", files.Texts{"run.sh": []byte(shared)})
	if err != nil {
		t.Fatal(err)
	}
	r, _, err := s.Revise(RolloutFraction, "fraction=0.5")
	if want := "X=0.8\n" + command + " " + key + "0.5 data.val_files=$X\n"; err != nil || string(r.Text) != want {
		t.Errorf("%v, %v; want\n%s", r, err, want)
	}
}
