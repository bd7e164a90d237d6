package job

import (
	"strings"
	"testing"

	"plimsoll/internal/base/files"
	"plimsoll/internal/plan/forward"
)

// TestReleasesOfPrograms: the defaults of a file are those of the release that a flag or an environment says, and the
// plan names the one that it assumes.
func TestReleasesOfPrograms(t *testing.T) {
	const sft = "model_name_or_path: qwen3-0.6b\ndataset_name: x\nmax_length: 512\nper_device_train_batch_size: 2\n"
	for _, c := range []struct {
		file, releases, loss string
		is                   forward.LossKind
		checkpoints          bool
		precision            string
		said                 string
	}{
		{sft, "", "", forward.TiledLoss, true, "bf16", "trl 1.16: no version was given"},
		{sft, "trl=1.15.0", "", forward.TiledLoss, true, "bf16", "trl 1.15.0: --release says so"},
		{sft, "trl==1.14.0", "", forward.RecomputedLoss, true, "bf16", "trl 1.14.0"},
		{sft + "loss_type: nll\n", "trl=1.14.0", "", forward.ShiftLabels, true, "bf16", "trl 1.14.0"},
		{sft + "loss_type: nll\n", "trl=1.16.0", "", forward.TiledLoss, true, "bf16", "trl 1.16.0"},
		{sft + "loss_type: chunked_nll\n", "trl=1.6.0", "", forward.RecomputedLoss, true, "bf16", "trl 1.6.0"},
		{sft, "trl=1.6.0", "", forward.ShiftLabels, true, "bf16", "trl 1.6.0"},
		{sft, "trl=0.21.0", "", forward.ShiftLabels, false, "bf16", "trl 0.21.0"},
		{sft, "trl=0.18.0", "", forward.ShiftLabels, false, "", "trl 0.18.0"},
		{sft, "", "fp32", forward.ShiftLabels, true, "bf16", "trl 1.16"},
		{sft + "trl_dpo: true\n", "trl=1.16.0", "", forward.TiledLoss, true, "bf16", "trl 1.16.0"},
		{sft + "trl_dpo: true\n", "trl=1.0.0", "", forward.SelectedLogProbabilities, true, "bf16", "trl 1.0.0"},
		{sft + "label_smoothing_factor: 0.1\n", "trl=1.16.0", "", forward.SmoothedLoss, true, "bf16", "trl 1.16.0"},
	} {
		q := Request{GPUs: 1, Configs: []string{"sft.yaml"}, Loss: c.loss,
			Texts: files.Texts{"sft.yaml": []byte(c.file)}}
		if c.releases != "" {
			q.Releases = []string{c.releases}
		}
		j, err := q.Resolve()
		if err != nil {
			t.Errorf("%s: %v", c.releases, err)
			continue
		}
		autocast := j.AutocastType.String() == "bf16" || strings.Contains(j.AutocastType.String(), "bfloat16")
		if j.Loss != c.is || (j.Recompute != nil) != c.checkpoints || autocast != (c.precision == "bf16") {
			t.Errorf("%s with %q: loss %v, checkpoints %v, autocast %v", c.file, c.releases, j.Loss, j.Recompute != nil,
				j.AutocastType)
		}
		if said := strings.Join(j.Assumptions, "\n"); !strings.Contains(said, c.said) {
			t.Errorf("%s: %q is not said:\n%s", c.releases, c.said, said)
		}
	}
}

// TestRefusedReleases: a release has a package that plans depend on, and a number.
func TestRefusedReleases(t *testing.T) {
	for said, want := range map[string]string{"trl": "expected a package and its release",
		"trl=new": "expected a package",
		"tlr=1.0": `did you mean "trl"?`, "numpy=2.0": "no plan depends on its release"} {
		q := Request{Model: "qwen3-0.6b", GPUs: 1, Recorded: Recorded{Releases: []string{said}}}
		if _, err := q.Resolve(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", said, err)
		}
	}
	q := Request{Model: "qwen3-0.6b", GPUs: 1, Recorded: Recorded{Releases: []string{"torch=2.8.0", "pytorch==2.7"}}}
	if j, err := q.Resolve(); err != nil || j.Versions.Torch.String() != "2.7" {
		t.Errorf("%+v, %v", j, err)
	}
}
