package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSignature: the script signs the provenance of a folder with packages, the commands that SECURITY.md gives verify
// it, and they refuse a provenance or a package that was changed.
func TestSignature(t *testing.T) {
	for _, program := range []string{"ssh-keygen", "git", "bash", "sha256sum"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is missing", program)
		}
	}
	project := t.TempDir()
	dist, key := filepath.Join(project, "dist"), filepath.Join(t.TempDir(), "key")
	command(t, project, `cp -r "$1/scripts/provenance" . && mkdir -p scripts dist packaging && mv provenance scripts
		cp -r "$1/packaging/provenance" packaging && cp "$1"/packaging/go.* packaging
		echo /dist/ >.gitignore
		git init --quiet && git add . && git -c user.name=t -c user.email=t@example.org commit --quiet --message c
		ssh-keygen -q -t ed25519 -N "" -f "$2"
		cd dist && echo package >plimsoll.tar.gz && sha256sum plimsoll.tar.gz >checksums.txt`, repository(t), key)
	command(t, project, `scripts/provenance 0.1.0 "$1" https://example.org/builder`, key)
	command(t, project, `cp "$1.pub" dist/plimsoll-release.pub`, key)
	verify := verification(t)
	if out, err := try(dist, verify); err != nil || !strings.Contains(out, "Good") {
		t.Fatalf("%v\n%s\nexpected a good signature", err, out)
	}
	for _, name := range []string{"provenance.json", "plimsoll.tar.gz"} {
		path := filepath.Join(dist, name)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append(text, ' '), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := try(dist, verify); err == nil {
			t.Errorf("%s was changed, and is verified:\n%s", name, out)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestUncommittedChanges: a provenance names a commit, so the script refuses a working tree with changes.
func TestUncommittedChanges(t *testing.T) {
	project := t.TempDir()
	command(t, project, `cp -r "$1/scripts/provenance" . && mkdir scripts && mv provenance scripts && git init --quiet`,
		repository(t))
	if out, err := try(project, "scripts/provenance 0.1.0 key https://example.org"); err == nil ||
		!strings.Contains(out, "the working tree has changes") {
		t.Errorf("%v\n%s\nexpected a refusal", err, out)
	}
}

// repository returns the root of the sources.
func repository(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// verification returns the commands that SECURITY.md gives.
func verification(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository(t), "SECURITY.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "```sh\n")
	commands, _, found := strings.Cut(rest, "```")
	if !found || !strings.Contains(commands, "ssh-keygen -Y verify") {
		t.Fatal("SECURITY.md has no commands that verify a release")
	}
	return commands
}

func try(folder, script string, arguments ...string) (string, error) {
	c := exec.Command("bash", append([]string{"-e", "-c", script, "bash"}, arguments...)...)
	c.Dir = folder
	out, err := c.CombinedOutput()
	return string(out), err
}

func command(t *testing.T, folder, script string, arguments ...string) {
	t.Helper()
	if out, err := try(folder, script, arguments...); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}
